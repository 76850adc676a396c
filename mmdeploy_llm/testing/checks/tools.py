"""The checks of a parser of tool calls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.hooks import ToolCall, ToolParser, ToolParserSpec

from .base import Check, CheckSkipped, attributed, demand, new_parser
from .parsers import PLAIN
from .parsers import _generic as generic_texts
from .parsers import _splits as splits

MOST_TEXTS = 80  # made of the markers; each is tried in many pieces

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}

Case = tuple[str, tuple[Mapping[str, Any], ...]]  # a text, and the tools that it comes with
Result = tuple[str, tuple[tuple[str, str], ...]]  # content, and (name, arguments) of the calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserExample:
    """What the parser must make of `text`: content, and the name and arguments of each call.

    tools: JSON schemas of the request's tools.
    """

    text: str
    content: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserSubject:
    """A parser to check, and what its author says of it."""

    spec: ToolParserSpec
    examples: tuple[ToolParserExample, ...] = ()

    def new(self) -> ToolParser:
        """A parser for one request."""
        parser: ToolParser = new_parser(self.spec, ToolParser)
        return parser

    def cases(self) -> Iterator[Case]:
        """Texts and the tools they come with: the examples, and what its markers combine to."""
        yield from ((example.text, example.tools) for example in self.examples)
        made = list(dict.fromkeys(generic_texts(self.new().markers)))
        rng = random.Random(2)
        for text in rng.sample(made, min(MOST_TEXTS, len(made))):
            yield text, (TOOL,)

    def items(
        self, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[str | ToolCall]:
        """All that the parser gives for a text that comes in pieces."""
        parser = self.new()
        with attributed(
            f"parsing {''.join(pieces)!r}",
            "a parser must take any text; let what it cannot read be content",
        ):
            parser.start(tools)
            found = [item for piece in pieces for item in parser.feed(piece)]
            return found + parser.finish()

    def result(self, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()) -> Result:
        """Content, and name and arguments of each call."""
        return _result(self.items(pieces, tools))


def builds_without_arguments(subject: ToolParserSubject) -> None:
    """The factory gives a new ToolParser each time, with texts as markers."""
    first, second = subject.new(), subject.new()
    demand(
        first is not second,
        f"{subject.spec.factory}() gives the same object twice; each request needs a parser of its "
        "own, so return a new one",
    )
    markers = first.markers
    is_texts = isinstance(markers, tuple) and all(isinstance(m, str) and m for m in markers)
    demand(is_texts, f"`markers` is {markers!r}; make it a tuple of texts that are not empty")


def items_are_well_formed(subject: ToolParserSubject) -> None:
    """feed and finish give lists of texts and ToolCalls; arguments are JSON objects as text."""
    for text, tools in subject.cases():
        parser = subject.new()
        with attributed(f"parsing {text!r}", "a parser takes any text"):
            parser.start(tools)
            answers = (parser.feed(text), parser.finish())
        for method, answer in zip(("feed", "finish"), answers, strict=True):
            demand(
                isinstance(answer, list),
                f"{method} gives a {type(answer).__name__} for {text!r}; return a list of texts "
                "and ToolCalls",
            )
            for item in answer:
                _check_item(item, method, text)


def _check_item(item: object, method: str, text: str) -> None:
    if not isinstance(item, ToolCall):
        demand(
            isinstance(item, str) and item,
            f"{method} gives {item!r} for {text!r}; give texts that are not empty, and ToolCalls",
        )
        return
    try:
        is_object = isinstance(json.loads(item.arguments), dict)
    except (TypeError, ValueError):
        is_object = False
    demand(
        isinstance(item.name, str) and item.name and is_object,
        f"{method} gives {item!r} for {text!r}; a call needs a name, and arguments that are the "
        "text of a JSON object; what has neither is content",
    )


def empty_text_gives_nothing(subject: ToolParserSubject) -> None:
    """No text in, nothing out."""
    for pieces in ((), ("",)):
        found = subject.items(pieces)
        demand(not found, f"an empty text gives {found!r}; give nothing")


def plain_text_is_kept(subject: ToolParserSubject) -> None:
    """A text without any marker comes out as it is."""
    for pieces in ((PLAIN,), tuple(PLAIN)):
        found = subject.result(pieces)
        demand(
            found == (PLAIN, ()),
            f"of the text {PLAIN!r}, which holds no marker, {found!r} is left; give it as content, "
            "what was held back in `finish`",
        )


def nothing_is_lost(subject: ToolParserSubject) -> None:
    """A text in which no call is found comes out whole."""
    for text, tools in subject.cases():
        for end in (len(text), len(text) - 1, len(text) // 2):
            content, calls = subject.result((text[:end],), tools)
            demand(
                calls or content == text[:end],
                f"no call is found in {text[:end]!r}, but its content is {content!r}; give what "
                "turns out to be no call as content, tags included",
            )


def any_split_equals_the_whole(subject: ToolParserSubject) -> None:
    """The result does not depend on how the text is cut into `feed` calls."""
    rng = random.Random(0)
    for text, tools in subject.cases():
        whole = subject.result((text,), tools)
        for pieces in splits(text, rng):
            found = subject.result(pieces, tools)
            demand(
                found == whole,
                f"{text!r} gives (content, calls) {whole!r} in one piece, but {found!r} when it "
                f"comes as {list(pieces)!r}; hold back text at the end of a piece that may yet "
                "become a call",
            )


def no_state_is_shared(subject: ToolParserSubject) -> None:
    """Two requests at the same time do not influence each other."""
    cases = list(subject.cases())
    for (text, tools), (other, other_tools) in zip(cases, cases[::-1], strict=True):
        expected = subject.result(tuple(text), tools)
        found = _beside(subject, (text, tools), (other, other_tools))
        demand(
            found == expected,
            f"{text!r} gives {expected!r} alone, but {found!r} while another parser reads "
            f"{other!r}; keep the state in the instance (`self`, set in __init__), not in the "
            "class or the module",
        )


def _beside(subject: ToolParserSubject, case: Case, other: Case) -> Result:
    """The result of one case while another parser reads the other one."""
    first, second = subject.new(), subject.new()
    items: list[str | ToolCall] = []
    with attributed(f"parsing {case[0]!r} beside {other[0]!r}", "a parser takes any text"):
        first.start(case[1])
        second.start(other[1])
        for index in range(max(len(case[0]), len(other[0]))):
            items += first.feed(case[0][index : index + 1])
            second.feed(other[0][index : index + 1])
        second.finish()
        return _result(items + first.finish())


def examples_hold(subject: ToolParserSubject) -> None:
    """The author's examples, whole and character by character."""
    if not subject.examples:
        raise CheckSkipped("no examples were given; add some to `examples`")
    for example in subject.examples:
        for pieces in ((example.text,), tuple(example.text)):
            content, calls = subject.result(pieces, example.tools)
            read = tuple((name, json.loads(arguments)) for name, arguments in calls)
            demand(
                (content, read) == (example.content, example.calls),
                f"{example.text!r} gives (content, calls) {(content, read)!r}, but the example "
                f"says {(example.content, example.calls)!r}; correct the parser or the example",
            )


CHECKS: tuple[Check, ...] = (
    builds_without_arguments,
    items_are_well_formed,
    empty_text_gives_nothing,
    plain_text_is_kept,
    nothing_is_lost,
    any_split_equals_the_whole,
    no_state_is_shared,
    examples_hold,
)


def _result(items: Sequence[str | ToolCall]) -> Result:
    content = "".join(item for item in items if isinstance(item, str))
    calls = tuple((item.name, item.arguments) for item in items if isinstance(item, ToolCall))
    return content, calls
