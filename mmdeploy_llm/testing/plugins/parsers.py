"""Checks of a reasoning parser."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol, get_args, get_type_hints

from mmdeploy_llm.hooks import (
    NextText,
    ReasoningParser,
    ReasoningParserSpec,
    Segment,
    ToolParserSpec,
)
from mmdeploy_llm.testing.models.base import (
    Check,
    CheckSkipped,
    attributed,
    demand,
    new_parser,
    since,
)

KINDS: tuple[str, ...] = get_args(get_type_hints(Segment)["kind"])
NEXT = "0"  # a text that no parser takes for a marker
PLAIN = "Two and two are four.\nWell: 4 < 5 > 3, said he."
SCRAPS = ("a", "b c", " ", "\n\n", "<", "</", "é", "[", "|", ">")
NUM_RANDOM_TEXTS = 30
NUM_RANDOM_SPLITS = 6
MAX_PAIRED = 8  # number of markers that are combined in pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserExample:
    """The reasoning and content expected for `text`, generated after `prompt`."""

    text: str
    reasoning: str
    content: str
    prompt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSubject:
    """A parser to check, and its author's examples."""

    spec: ReasoningParserSpec
    examples: tuple[ParserExample, ...] = ()

    def new(self) -> ReasoningParser:
        """Builds a parser for one request."""
        parser: ReasoningParser = new_parser(self.spec, ReasoningParser)
        return parser

    @property
    def markers(self) -> tuple[str, ...]:
        """The parser's markers."""
        return self.new().markers

    def texts(self) -> Iterator[str]:
        """Yields texts to parse: those of the examples, and combinations of the markers."""
        yield from dict.fromkeys(
            (*(item.text for item in self.examples), *generic_texts(self.markers))
        )

    def prompts(self) -> tuple[str, ...]:
        """Returns prompts, some of which end in a marker that may open or close the reasoning."""
        ends = tuple(f"Q: hi\nA: {marker}\n" for marker in self.markers[:MAX_PAIRED])
        return tuple(dict.fromkeys(("", *(item.prompt for item in self.examples), *ends)))

    def parse(self, pieces: Sequence[str], prompt: str = "") -> tuple[Segment, ...]:
        """Feeds a text in pieces; returns all segments."""
        what = f"parsing {''.join(pieces)!r} after prompt {prompt!r}"
        return tuple(fed(self.new(), pieces, prompt, what))

    def split(self, pieces: Sequence[str], prompt: str = "") -> tuple[str, str]:
        """Feeds a text in pieces; returns (reasoning, content)."""
        segments = self.parse(pieces, prompt)
        return _of_kind(segments, "reasoning"), _of_kind(segments, "content")


class _Built(Protocol):
    """A subject that builds parsers, of reasoning or of tool calls."""

    @property
    def spec(self) -> ReasoningParserSpec | ToolParserSpec: ...

    def new(self) -> Any: ...


def fed(parser: Any, pieces: Sequence[str], given: Any, what: str) -> list[Any]:
    """Starts a new parser with what is given (a prompt, tools) and feeds it a text in pieces;
    returns all that it answers."""
    with attributed(
        what, "a parser must accept any text; return what it cannot interpret as content"
    ):
        parser.start(given)
        found = [item for piece in pieces for item in parser.feed(piece)]
        return [*found, *parser.finish()]


def interleaved(subject: _Built, one: tuple[str, Any], other: tuple[str, Any]) -> list[Any]:
    """Feeds two texts, each with what its parser starts with, to two parsers, alternating by
    character; returns what the parser of `one` answers."""
    first, second = subject.new(), subject.new()
    found: list[Any] = []
    with attributed(f"parsing {one[0]!r} and {other[0]!r} in turn", "a parser accepts any text"):
        first.start(one[1])
        second.start(other[1])
        for index in range(max(len(one[0]), len(other[0]))):
            found += first.feed(one[0][index : index + 1])
            second.feed(other[0][index : index + 1])
        second.finish()
        found += first.finish()
    return found


def demand_unshared(one: tuple[str, Any], other: str, found: Any) -> None:
    """Fails where a text, given with what it yields alone, yields something else beside another."""
    text, expected = one
    demand(
        found == expected,
        f"{text!r} yields {expected!r} alone, but {found!r} while another parser reads "
        f"{other!r}; keep the state in the instance (`self`, set in __init__), not in the "
        "class or the module",
    )


def demand_new_each_time(subject: _Built) -> None:
    """Fails where the factory returns one parser twice."""
    first, second = subject.new(), subject.new()
    demand(
        first is not second,
        f"{subject.spec.factory}() returns the same object twice; each request needs a parser of "
        "its own, so return a new one",
    )


def demand_texts(markers: Any) -> None:
    """Fails unless the markers are a tuple of texts."""
    is_texts = isinstance(markers, tuple) and all(isinstance(m, str) and m for m in markers)
    demand(is_texts, f"`markers` is {markers!r}; make it a tuple of texts that are not empty")


def builds_without_arguments(subject: ParserSubject) -> None:
    """The factory returns a new ReasoningParser each time."""
    demand_new_each_time(subject)


def markers_are_consistent(subject: ParserSubject) -> None:
    """`markers` are texts, each once, and `end_marker` is one of them and ends the reasoning."""
    parser = subject.new()
    markers, end = parser.markers, parser.end_marker
    demand_texts(markers)
    demand(
        len(set(markers)) == len(markers), f"`markers` {markers!r} holds a text twice; remove one"
    )
    start = parser.start_marker
    if end is None:
        demand(start is None, f"`start_marker` is {start!r} without `end_marker`; set both or none")
        return
    demand(
        end in markers,
        f"`end_marker` {end!r} is not in `markers` {markers!r}; add it, or the tokenizer may drop "
        "it as a special token before the parser sees it",
    )
    demand(
        _ends_reasoning(subject, end),
        f"`end_marker` {end!r} ends the reasoning of no text 'why{end}so', whichever marker opened "
        "it, or stays in it; set `end_marker` to the text that ends the reasoning, or to None, and "
        "drop it from the text",
    )
    demand(
        start is None or _opens_reasoning(subject, start, end),
        f"`start_marker` {start!r} at the end of a prompt opens no reasoning up to {end!r}, or "
        "both of them do not close it; read the prompt in `start`, and set `start_marker` to the "
        "text by which a prompt opens the reasoning, or to None",
    )


def _ends_reasoning(subject: ParserSubject, end: str) -> bool:
    """Returns whether `end` ends reasoning that some marker or prompt opens. If none opens any,
    returns whether the parser recognizes `end` as a marker."""
    found = [
        subject.split((f"{opening}why{end}so",), prompt)
        for opening, prompt in product(("", *subject.markers), subject.prompts())
    ]
    opened = [reasoning for reasoning, _ in found if "why" in reasoning]
    if opened:
        return any("so" not in reasoning and end not in reasoning for reasoning in opened)
    return any(end not in content for _, content in found)


def _opens_reasoning(subject: ParserSubject, start: str, end: str) -> bool:
    """Whether a prompt that ends with `start` opens the reasoning, and `end` after it closes it, so
    that a text with `end` is not read as thinking again."""
    text = (f"why{end}so",)
    opened, _ = subject.split(text, f"Q: hi\nA: {start}")
    closed, _ = subject.split(("so",), f"Q: hi\nA: {start}{end}")
    again, _ = subject.split(text, f"Q: hi\nA: {start}{end}")
    return "why" in opened and "so" not in opened and not closed and again != opened


def segments_are_well_formed(subject: ParserSubject) -> None:
    """feed and finish return lists of Segments that are not empty."""
    for text, prompt in product(subject.texts(), subject.prompts()):
        parser = subject.new()
        with attributed(f"parsing {text!r} after prompt {prompt!r}", "a parser accepts any text"):
            parser.start(prompt)
            answers = (parser.feed(text), parser.finish())
        for method, answer in zip(("feed", "finish"), answers, strict=True):
            demand(
                isinstance(answer, list),
                f"{method} returns a {type(answer).__name__} for {text!r}; return a list of "
                "Segments",
            )
            for segment in answer:
                demand(
                    isinstance(segment, Segment) and segment.kind in KINDS,
                    f"{method} returns {segment!r} for {text!r}; return Segments of kind "
                    f"{' or '.join(map(repr, KINDS))}",
                )
                demand(
                    isinstance(segment.text, str) and segment.text,
                    f"{method} returns a segment without text for {text!r}; leave it out",
                )


def any_split_equals_the_whole(subject: ParserSubject) -> None:
    """The result does not depend on how the text is split into `feed` calls."""
    rng = random.Random(0)
    for text, prompt in product(subject.texts(), subject.prompts()):
        whole = subject.split((text,), prompt)
        for pieces in splits(text, rng, every=4 if prompt else 1):
            found = subject.split(pieces, prompt)
            demand(
                found == whole,
                f"{text!r} after prompt {prompt!r} yields (reasoning, content) {whole!r} in one "
                f"piece, but {found!r} when it comes as {list(pieces)!r}; hold back text at the "
                "end of a piece while it may be the start of a marker, and text whose kind a later "
                "marker decides",
            )


def nothing_is_made_up(subject: ParserSubject) -> None:
    """The segments are pieces of the text in their order, with nothing added."""
    for text, prompt in product(subject.texts(), subject.prompts()):
        found = "".join(segment.text for segment in subject.parse((text,), prompt))
        rest = iter(text)
        demand(
            all(character in rest for character in found),
            f"{text!r} after prompt {prompt!r} yields {found!r}, which has characters added or "
            "reordered; a parser splits the text, it does not add to it or reorder it",
        )


def plain_text_is_kept(subject: ParserSubject) -> None:
    """A text without markers comes out whole, except for whitespace at its ends."""
    for pieces in ((PLAIN,), tuple(PLAIN)):
        reasoning, content = subject.split(pieces)
        demand(
            (reasoning + content).strip() == PLAIN.strip(),
            f"the text {PLAIN!r}, which has no marker, yields {reasoning + content!r}; return in "
            "`finish` what was held back, so that an answer without markers is not lost",
        )


def the_end_is_kept(subject: ParserSubject) -> None:
    """A text that ends in the middle of a marker comes out with that end: it was cut off there, or
    is no marker."""
    markers = subject.new().markers
    for before, prompt in product(("a", *(f"{marker}a" for marker in markers)), subject.prompts()):
        if not _all_text(subject, f"{before}xyz", prompt).endswith("xyz"):
            continue  # all text is dropped here
        for marker in markers:
            end = marker[:-1]
            if any(other in end for other in markers):
                continue
            found = _all_text(subject, before + end, prompt)
            demand(
                found.rstrip().endswith(end.rstrip()),
                f"{before + end!r} after prompt {prompt!r} yields {found!r}: the end of the text "
                "is lost; return in `finish` what was held back",
            )


@since(1, 2)
def the_end_keeps_its_kind(subject: ParserSubject) -> None:
    """Text that was held back at the end is of the kind that it has where more text follows, and an
    answer that is cut off within the thinking that a prompt or the text opened is reasoning."""
    for text, prompt in product(subject.texts(), subject.prompts()):
        found = _kinds(subject, text, prompt)
        longer = _kinds(subject, text + NEXT, prompt)[: len(found)]
        demand(
            found == longer,
            f"{text!r} after prompt {prompt!r} ends as (reasoning, content) "
            f"{subject.split((text,), prompt)!r}, but where {NEXT!r} follows it is "
            f"{subject.split((text + NEXT,), prompt)!r}; let `finish` return what was held back as "
            "the kind that the text has at that place",
        )
    parser = subject.new()
    start, end = parser.start_marker, parser.end_marker
    if start is None or end is None:
        return
    for text, prompt in (("why", f"Q: hi\nA: {start}"), (f"{start}why", "")):
        if subject.split((f"{text}{end}so",), prompt) != ("why", "so"):
            continue  # it opens no reasoning there
        found_split = subject.split((text,), prompt)
        demand(
            found_split == ("why", ""),
            f"{text!r} after prompt {prompt!r}, an answer that was cut off within its thinking, "
            f"yields (reasoning, content) {found_split!r}; let `finish` return it as reasoning",
        )


def _kinds(subject: ParserSubject, text: str, prompt: str) -> list[tuple[str, str]]:
    """Returns the kind of each character that is no whitespace."""
    segments = subject.parse((text,), prompt)
    return [(one.kind, own) for one in segments for own in one.text if not own.isspace()]


def _all_text(subject: ParserSubject, text: str, prompt: str) -> str:
    return "".join(segment.text for segment in subject.parse((text,), prompt))


def empty_text_gives_nothing(subject: ParserSubject) -> None:
    """An empty text yields no segments."""
    for pieces, prompt in product(((), ("",)), subject.prompts()):
        found = subject.parse(pieces, prompt)
        demand(
            not found,
            f"an empty text after prompt {prompt!r} yields {list(found)!r}; return no segments",
        )


def no_state_is_shared(subject: ParserSubject) -> None:
    """Parsers of concurrent requests do not influence each other."""
    prompts = subject.prompts()
    texts = tuple(subject.texts())
    for number, (text, other) in enumerate(zip(texts, texts[::-1], strict=True)):
        prompt, other_prompt = prompts[number % len(prompts)], prompts[-1 - number % len(prompts)]
        expected = subject.split(tuple(text), prompt)
        segments = interleaved(subject, (text, prompt), (other, other_prompt))
        found = _of_kind(segments, "reasoning"), _of_kind(segments, "content")
        demand_unshared((text, expected), other, found)


def next_text_says_what_comes(subject: ParserSubject) -> None:
    """`next_text` agrees with how the next text is parsed, and asking changes nothing."""
    for text, prompt in product(subject.texts(), subject.prompts()):
        asked, unasked = subject.new(), subject.new()
        what = f"after {text!r:.200} and prompt {prompt!r:.200}"
        with attributed(f"next_text {what}", "a constraint asks it after any token"):
            for parser in (asked, unasked):
                parser.start(prompt)
                parser.feed(text)
            found, again = asked.next_text(), asked.next_text()
            rest = asked.parse(NEXT)
        kinds = get_args(get_type_hints(NextText)["kind"])
        demand(
            isinstance(found, NextText) and found.kind in kinds and found == again,
            f"next_text {what} returns {found!r}, then {again!r}; return the same NextText, of "
            f"kind {' or '.join(kinds)}",
        )
        expected = unasked.parse(NEXT)
        demand(
            _merged(rest) == _merged(expected),
            f"{what}, the text {NEXT!r} is parsed as {rest!r}, but as {expected!r} where next_text "
            "was not asked; it must not change the parser",
        )
        if not expected or found.kind == "tag":
            continue
        is_thinking = expected[-1].kind == "reasoning"
        demand(
            (found.kind == "free") == is_thinking,
            f"next_text {what} is of kind {found.kind!r}, but the text {NEXT!r} that follows is "
            f"{expected[-1].kind}; say 'free' in the thinking and 'answer' in the answer",
        )


def _merged(segments: Sequence[Segment]) -> list[tuple[str, str]]:
    return [(kind, _of_kind(segments, kind)) for kind in KINDS]


def examples_hold(subject: ParserSubject) -> None:
    """The author's examples hold, in one piece and character by character."""
    if not subject.examples:
        raise CheckSkipped("no examples were given; add some to `examples`")
    for example in subject.examples:
        for pieces in ((example.text,), tuple(example.text)):
            found = subject.split(pieces, example.prompt)
            demand(
                found == (example.reasoning, example.content),
                f"{example.text!r} after prompt {example.prompt!r} yields (reasoning, content) "
                f"{found!r}, but the example says {(example.reasoning, example.content)!r}; "
                "correct the parser or the example",
            )


CHECKS: tuple[Check, ...] = (
    builds_without_arguments,
    markers_are_consistent,
    segments_are_well_formed,
    empty_text_gives_nothing,
    plain_text_is_kept,
    the_end_is_kept,
    the_end_keeps_its_kind,
    nothing_is_made_up,
    any_split_equals_the_whole,
    no_state_is_shared,
    next_text_says_what_comes,
    examples_hold,
)


def _of_kind(segments: Sequence[Segment], kind: str) -> str:
    return "".join(segment.text for segment in segments if segment.kind == kind)


def generic_texts(markers: Sequence[str]) -> Iterator[str]:
    """Yields texts built from the markers: alone, at either end, truncated, in pairs, at random."""
    yield from ("", " ", PLAIN)
    for marker in markers:
        yield from (marker, f"{marker}a", f"a{marker}", f"a{marker}b", f" \n{marker}\n\nb ")
        yield from (f"a{marker[:-1]}", f"a{marker[:-1]}b", marker * 2, marker[1:])
    for first, second in product(markers[:MAX_PAIRED], repeat=2):
        yield from (f"{first}a{second}b", f"a{first}{second}b")
    rng = random.Random(1)
    for _ in range(NUM_RANDOM_TEXTS):
        yield "".join(rng.choices((*markers, *SCRAPS), k=rng.randint(2, 10)))


def splits(text: str, rng: random.Random, every: int = 1) -> Iterator[tuple[str, ...]]:
    """Yields splits of a text: by character, in two at each place or one of `every`, at random."""
    yield tuple(text)
    yield from ((text[:at], text[at:]) for at in range(1 + rng.randrange(every), len(text), every))
    for _ in range(NUM_RANDOM_SPLITS if len(text) > 2 else 0):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 6)))
        bounds = zip((0, *cuts), (*cuts, len(text)), strict=True)
        yield tuple(text[start:end] for start, end in bounds)
