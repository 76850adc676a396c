"""Checks of a parser of tool calls."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.hooks import ToolCall, ToolParser, ToolParserSpec
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand, new_parser

from .parsers import (
    PLAIN,
    demand_new_each_time,
    demand_texts,
    demand_unshared,
    fed,
    generic_texts,
    interleaved,
    splits,
)

AFTER = "\n\nThese are the calls."
MAX_TEXTS = 80  # texts built from the markers; each is split in many ways

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}

Case = tuple[str, tuple[Mapping[str, Any], ...]]  # text, tools of the request
Result = tuple[str, tuple[tuple[str, str], ...]]  # content, (name, arguments) of each call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserExample:
    """The content, and the name and arguments of each call, expected for `text`.

    tools: JSON schemas of the request's tools.
    """

    text: str
    content: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolParserSubject:
    """A parser to check, and its author's examples."""

    spec: ToolParserSpec
    examples: tuple[ToolParserExample, ...] = ()

    def new(self) -> ToolParser:
        """Builds a parser for one request."""
        parser: ToolParser = new_parser(self.spec, ToolParser)
        return parser

    def cases(self) -> Iterator[Case]:
        """Yields texts with their tools: the examples, and texts built from the markers."""
        yield from ((example.text, example.tools) for example in self.examples)
        made = list(dict.fromkeys(generic_texts(self.new().markers)))
        rng = random.Random(2)
        for text in rng.sample(made, min(MAX_TEXTS, len(made))):
            yield text, (TOOL,)

    def items(
        self, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[str | ToolCall]:
        """Feeds a text in pieces; returns all texts and calls."""
        return fed(self.new(), pieces, tools, f"parsing {''.join(pieces)!r}")

    def result(self, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()) -> Result:
        """Feeds a text in pieces; returns content, and name and arguments of each call."""
        return _result(self.items(pieces, tools))


def builds_without_arguments(subject: ToolParserSubject) -> None:
    """The factory returns a new ToolParser each time, whose markers are strings."""
    demand_new_each_time(subject)
    demand_texts(subject.new().markers)


def items_are_well_formed(subject: ToolParserSubject) -> None:
    """feed and finish return lists of strings and ToolCalls; arguments are JSON objects as text."""
    for text, tools in subject.cases():
        parser = subject.new()
        with attributed(f"parsing {text!r}", "a parser accepts any text"):
            parser.start(tools)
            answers = (parser.feed(text), parser.finish())
        for method, answer in zip(("feed", "finish"), answers, strict=True):
            demand(
                isinstance(answer, list),
                f"{method} returns a {type(answer).__name__} for {text!r}; return a list of texts "
                "and ToolCalls",
            )
            for item in answer:
                _check_item(item, method, text)


def _check_item(item: object, method: str, text: str) -> None:
    if not isinstance(item, ToolCall):
        demand(
            isinstance(item, str) and item,
            f"{method} returns {item!r} for {text!r}; return texts that are not empty, and "
            "ToolCalls",
        )
        return
    try:
        is_object = isinstance(json.loads(item.arguments), dict)
    except (TypeError, ValueError):
        is_object = False
    demand(
        isinstance(item.name, str) and item.name and is_object,
        f"{method} returns {item!r} for {text!r}; a call needs a name, and arguments that are the "
        "text of a JSON object; return anything else as content",
    )


def empty_text_gives_nothing(subject: ToolParserSubject) -> None:
    """An empty text yields nothing."""
    for pieces in ((), ("",)):
        found = subject.items(pieces)
        demand(not found, f"an empty text yields {found!r}; return an empty list")


def plain_text_is_kept(subject: ToolParserSubject) -> None:
    """A text without markers comes out unchanged."""
    for pieces in ((PLAIN,), tuple(PLAIN)):
        found = subject.result(pieces)
        demand(
            found == (PLAIN, ()),
            f"the text {PLAIN!r}, which has no marker, yields {found!r}; return it as content, "
            "and in `finish` what was held back",
        )


def nothing_is_lost(subject: ToolParserSubject) -> None:
    """A text without a call comes out whole."""
    for text, tools in subject.cases():
        for end in (len(text), len(text) - 1, len(text) // 2):
            content, calls = subject.result((text[:end],), tools)
            demand(
                calls or content == text[:end],
                f"no call is found in {text[:end]!r}, but its content is {content!r}; return text "
                "that turns out to be no call as content, including its tags",
            )


def any_split_equals_the_whole(subject: ToolParserSubject) -> None:
    """The result does not depend on how the text is split into `feed` calls."""
    rng = random.Random(0)
    for text, tools in subject.cases():
        whole = subject.result((text,), tools)
        for pieces in splits(text, rng):
            found = subject.result(pieces, tools)
            demand(
                found == whole,
                f"{text!r} yields (content, calls) {whole!r} in one piece, but {found!r} when it "
                f"comes as {list(pieces)!r}; hold back text at the end of a piece while it may be "
                "the start of a call",
            )


def a_call_comes_when_it_is_complete(subject: ToolParserSubject) -> None:
    """The call of an example is returned by `feed`, as soon as its text is there, where content
    follows it; not only by `finish`."""
    examples = [example for example in subject.examples if example.calls]
    if not examples:
        raise CheckSkipped("no example has a call; add one to `examples`")
    for example in examples:
        parser = subject.new()
        with attributed(f"parsing {example.text!r}", "a parser accepts any text"):
            parser.start(example.tools)
            found = [
                item for character in f"{example.text}{AFTER}" for item in parser.feed(character)
            ]
            at_end = parser.finish()
        late = [item for item in at_end if isinstance(item, ToolCall)]
        demand(
            not late or any(isinstance(item, ToolCall) for item in found),
            f"no call of {example.text!r} is returned before the text has ended, although "
            f"{AFTER!r} follows; return each call from `feed` when it is complete",
        )


def no_state_is_shared(subject: ToolParserSubject) -> None:
    """Parsers of concurrent requests do not influence each other."""
    cases = list(subject.cases())
    for (text, tools), (other, other_tools) in zip(cases, cases[::-1], strict=True):
        expected = subject.result(tuple(text), tools)
        found = _result(interleaved(subject, (text, tools), (other, other_tools)))
        demand_unshared((text, expected), other, found)


def examples_hold(subject: ToolParserSubject) -> None:
    """The author's examples hold, in one piece and character by character."""
    if not subject.examples:
        raise CheckSkipped("no examples were given; add some to `examples`")
    for example in subject.examples:
        expected = example.content, tuple((name, dict(given)) for name, given in example.calls)
        for pieces in ((example.text,), tuple(example.text)):
            content, calls = subject.result(pieces, example.tools)
            read = tuple((name, json.loads(arguments)) for name, arguments in calls)
            demand(
                (content, read) == expected,
                f"{example.text!r} yields (content, calls) {(content, read)!r}, but the example "
                f"says {expected!r}; correct the parser or the example",
            )


def values_come_through(subject: ToolParserSubject) -> None:
    """Arguments of an example hold any text: quotes, backslashes, line breaks, braces, tags."""
    checked = False
    for example in subject.examples:
        for was, key, text in _texts_in(example):
            for value in _hostile():
                other = json.dumps(value, ensure_ascii=False) if was == json.dumps(text) else value
                checked = True
                _demand_value(subject, example, example.text.replace(was, other), key, value)
    if not checked:
        raise CheckSkipped(
            "no example has one call with a text among its arguments that stands once in the "
            "example; add one to `examples`"
        )


def _texts_in(example: ToolParserExample) -> Iterator[tuple[str, str, str]]:
    """Yields how a text among the arguments is written, its key, and the text."""
    if len(example.calls) != 1:
        return
    for key, text in example.calls[0][1].items():
        if isinstance(text, str) and len(text) > 1:
            written = next((it for it in (json.dumps(text), text) if it in example.text), None)
            if written is not None and example.text.count(written) == 1:
                yield written, key, text


def _hostile() -> Iterator[str]:
    """Yields texts that parsers lose."""
    yield from (
        'say "hi"',
        "C:\\new\\table",
        "a\nb",
        "\u00e9\u4e2d\U0001f600",
        "{[}]",
        "it's, 1: 2",
    )
    yield "0123456789" * 20


def _demand_value(
    subject: ToolParserSubject, example: ToolParserExample, text: str, key: str, value: str
) -> None:
    name, arguments = example.calls[0]
    expected = (example.content, ((name, {**arguments, key: value}),))
    for pieces in ((text,), tuple(text)):
        content, calls = subject.result(pieces, example.tools)
        read = tuple((of, json.loads(given)) for of, given in calls)
        demand(
            (content, read) == expected,
            f"{text!r:.300} yields (content, calls) {(content, read)!r:.300}, but its argument "
            f"{key!r} is {value!r:.300}; decode values as the format says (JSON with json, never "
            "by searching for quotes and braces)",
        )


CHECKS: tuple[Check, ...] = (
    builds_without_arguments,
    items_are_well_formed,
    empty_text_gives_nothing,
    plain_text_is_kept,
    nothing_is_lost,
    any_split_equals_the_whole,
    a_call_comes_when_it_is_complete,
    no_state_is_shared,
    examples_hold,
    values_come_through,
)


def _result(items: Sequence[str | ToolCall]) -> Result:
    content = "".join(item for item in items if isinstance(item, str))
    calls = tuple((item.name, item.arguments) for item in items if isinstance(item, ToolCall))
    return content, calls
