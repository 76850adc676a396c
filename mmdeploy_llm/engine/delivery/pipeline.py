"""TextPipeline: turns the token ids of one request into content, reasoning and tool calls.

ids --> StopSequences --> Detokenizer --> StopStrings --> ReasoningParser --> ToolParser --> content
                                               |               |                 |
                                raw text <-----+  reasoning <--+  tool calls <---+
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from mmdeploy_llm.errors import PluginContractError, PluginError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.objects.parsing import ReasoningParser, Segment, ToolParser
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.request_output import ToolCall
from mmdeploy_llm.values.plan import RequestFailure

from .detokenizer import Detokenizer, Vocabulary
from .stop import StopSequences, StopStrings

logger = logging.getLogger(__name__)

KINDS = ("content", "reasoning", "tool_calls")
ParserT = TypeVar("ParserT", ReasoningParser, ToolParser)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSource(Generic[ParserT]):
    """Builds the parsers of one type. create: builds one parser per request. name: for messages."""

    create: Callable[[], ParserT]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSources:
    """Sources of every request's parsers; None where no parser of that type is in use."""

    reasoning: ParserSource[ReasoningParser] | None = None
    tools: ParserSource[ToolParser] | None = None


class TextPipeline:
    """The text of one request. The result does not depend on how the ids are split into pieces.

    Stop strings are searched in the raw text, reasoning and markers included. An exception of a
    parser is stored in `failure`; from then on the text is only collected unparsed. Writer:
    Delivery.
    """

    def __init__(self, vocabulary: Vocabulary, request: Request, sources: ParserSources) -> None:
        params = request.params
        self.failure: RequestFailure | None = None
        self.num_calls = 0
        self._sources = sources
        self._reasoning: ReasoningParser | None = None
        self._tools: ToolParser | None = None
        self._detokenizer = Detokenizer(
            vocabulary,
            skip_special_tokens=params.skip_special_tokens,
            markers=self._start_parsers(request),
        )
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop, is_included=params.include_stop_str_in_output)
        self._sequences: StopSequences | None = None
        if params.stop_token_sequences:
            self._sequences = StopSequences(
                params.stop_token_sequences,
                is_included=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._raw: list[str] = []
        self._pieces: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._answer: list[str] | None = None
        self._calls: list[ToolCall] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a stop sequence was found."""
        return any(one is not None and one.is_stopped for one in (self._stops, self._sequences))

    @property
    def found_stop(self) -> str | tuple[int, ...] | None:
        """The stop string or stop sequence that was found; None without one."""
        found = [one.found for one in (self._stops, self._sequences) if one is not None]
        return next((one for one in found if one is not None), None)

    @property
    def raw_text(self) -> str:
        """The text so far, tags included, truncated at the stop string."""
        return "".join(self._raw)

    def keep_answer(self, tags: Sequence[str]) -> None:
        """Called before any token: keeps `answer`, and special tokens that are `tags` in it."""
        self._answer = []
        self._detokenizer.show(tags)

    @property
    def answer(self) -> str:
        """The text so far without the reasoning, tool calls included, where it is kept."""
        return "".join(self._answer or ())

    def push(self, token_ids: Sequence[int]) -> int:
        """Processes the next tokens, up to one that completes a stop; returns how many."""
        if self._stops is None and self._sequences is None:
            self._push(token_ids)
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            self._push((token_id,) if self._sequences is None else self._sequences.feed(token_id))
            if self.is_stopped:
                return count
        return len(token_ids)

    def end_with(self, token_id: int) -> None:
        """Processes the id that ended the request, which is no part of the text, but may complete a
        stop sequence."""
        if self._sequences is not None:
            self._push(self._sequences.end_with(token_id))

    def _push(self, token_ids: Sequence[int]) -> None:
        """Turns ids that are settled into text."""
        if self._stops is None:
            self._pass_on(self._detokenizer.push(token_ids))
            return
        for token_id in token_ids:  # one by one, because min_tokens counts tokens
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            self._pass_on(self._stops.feed(text, can_stop=self._can_stop()))

    def finish(self, *, is_cut: bool) -> None:
        """Releases all text that was held back; no token follows.

        is_cut: the model has not ended by itself, nor was it asked to stop here.
        """
        if self._sequences is not None:
            self._push(self._sequences.finish())
        text = self._detokenizer.finish(is_cut=is_cut)
        if self._stops is not None:
            text = self._stops.feed(text, can_stop=self._can_stop()) + self._stops.finish()
        self._pass_on(text)
        reasoning, tools = self._reasoning, self._tools
        if reasoning is not None:
            self._split_reasoning(reasoning.finish)
        if tools is not None:
            self._collect_calls(tools.finish)

    def take(self, kind: str) -> str:
        """Returns the new text of one kind, "content" or "reasoning", since the last call."""
        text = "".join(self._pieces[kind])
        self._pieces[kind].clear()
        return text

    def take_calls(self) -> tuple[ToolCall, ...]:
        """Returns the tool calls that are new since the last call, with their indices."""
        calls = tuple(self._calls)
        self._calls.clear()
        return calls

    def _can_stop(self) -> bool:
        return self._num_tokens >= self._min_tokens

    def _pass_on(self, text: str) -> None:
        if not text:
            return
        self._raw.append(text)
        parser = self._reasoning
        if parser is not None:
            self._split_reasoning(lambda: parser.feed(text))
        elif self._sources.reasoning is None:
            self._add_content(text)

    def _split_reasoning(self, parse: Callable[[], list[Segment]]) -> None:
        """Passes on the segments that `parse`, a call of the reasoning parser, returns."""

        def checked() -> list[Segment]:
            return [_checked_segment(segment) for segment in parse()]

        for segment in self._guarded("reasoning", self._sources.reasoning, checked):
            if segment.kind == "reasoning":
                self._pieces["reasoning"].append(segment.text)
            elif segment.kind == "content" or self._tools is not None:
                self._add_content(segment.text)

    def _add_content(self, text: str) -> None:
        """Passes content to the tool parser, or collects it when there is none."""
        if self._answer is not None:
            self._answer.append(text)
        parser = self._tools
        if parser is not None:
            self._collect_calls(lambda: parser.feed(text))
        elif self._sources.tools is None:
            self._pieces["content"].append(text)

    def _collect_calls(self, parse: Callable[[], list[str | ToolCall]]) -> None:
        """Collects the content and calls that `parse`, a call of the tool parser, returns."""

        def checked() -> list[str | ToolCall]:
            return [_checked_item(item) for item in parse()]

        for item in self._guarded("tool", self._sources.tools, checked):
            if isinstance(item, str):
                self._pieces["content"].append(item)
            else:
                self._calls.append(replace(item, index=self.num_calls))
                self.num_calls += 1

    def _start_parsers(self, request: Request) -> Sequence[str]:
        """Builds and starts the parsers and returns their markers. Sets `failure` if one raises."""
        reasoning, tools = self._sources.reasoning, self._sources.tools
        markers: list[str] = []
        if reasoning is not None:
            create = partial(_started, reasoning, request.prompt_text)
            for parser in self._guarded("reasoning", reasoning, create):
                self._reasoning = parser
                markers += parser.markers
        if tools is not None and self.failure is None:
            create_tools = partial(_started, tools, request.tools)
            for tool_parser in self._guarded("tool", tools, create_tools):
                self._tools = tool_parser
                markers += tool_parser.markers
        return markers

    def _guarded(
        self, kind: str, source: ParserSource[ParserT] | None, call: Callable[[], list[T]]
    ) -> list[T]:
        """Calls a parser. When it raises, sets `failure` and returns []."""
        assert source is not None
        try:
            return call()
        except FAULTS as error:
            logger.warning("%s parser %s failed", kind, source.name, exc_info=error)
            self._reasoning = self._tools = None
            self.failure = RequestFailure(
                code=PluginError.code,
                message=f"{kind} parser {source.name} failed: {error_text(error)}; "
                "the text is returned unparsed",
            )
            return []


def _started(source: ParserSource[ParserT], context: Any) -> list[ParserT]:
    """Builds a parser and starts it with the prompt or the tools. Its markers are read here too,
    so that a property that raises counts as a failure of the parser."""
    parser = source.create()
    parser.start(context)
    tuple(parser.markers)
    return [parser]


def _checked_segment(segment: object) -> Segment:
    if isinstance(segment, Segment) and segment.kind in KINDS:
        return segment
    raise PluginContractError(
        f"it returned {segment!r}; it must return a list of Segments of kind "
        "'content', 'reasoning' or 'tool_calls'"
    )


def _checked_item(item: object) -> str | ToolCall:
    if isinstance(item, str):
        return item
    if isinstance(item, ToolCall) and item.name and isinstance(item.arguments, str):
        return item
    raise PluginContractError(f"it returned {item!r}; it must return a list of texts and ToolCalls")
