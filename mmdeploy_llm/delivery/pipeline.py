"""Token ids of one request to content, reasoning and tool calls.

ids --> Detokenizer --> StopStrings --> ReasoningParser --> ToolParser --> content, tool calls
                               |               |
                               |               +--> reasoning
                               +--> raw text, undivided
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from mmdeploy_llm.errors import PluginContractError, PluginError
from mmdeploy_llm.hooks.contracts import ReasoningParser, Segment, ToolParser
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.outputs import ToolCall
from mmdeploy_llm.plan import RequestFailure
from mmdeploy_llm.request import Request

from .detokenizer import Detokenizer, Vocabulary
from .stop import StopStrings

logger = logging.getLogger(__name__)

KINDS = ("content", "reasoning", "tool_calls")
ParserT = TypeVar("ParserT", ReasoningParser, ToolParser)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSource(Generic[ParserT]):
    """Where the parsers of one sort come from. create: one parser a request. name: for messages."""

    create: Callable[[], ParserT]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSources:
    """The parsers of every request; None where there is none of a sort."""

    reasoning: ParserSource[ReasoningParser] | None = None
    tools: ParserSource[ToolParser] | None = None


class TextPipeline:
    """The text of one request. The result does not depend on how the ids are cut into pieces.

    Stop strings look at the raw text, so at reasoning and markers too. A raising parser ends up in
    `failure`; from then on the text is only collected undivided. Writer: Delivery.
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
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._raw: list[str] = []
        self._pieces: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._calls: list[ToolCall] = []

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops is not None and self._stops.is_stopped

    @property
    def raw_text(self) -> str:
        """The text so far, tags included, cut at the stop string."""
        return "".join(self._raw)

    def push(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens."""
        if self._stops is None:
            self._pass_on(self._detokenizer.push(token_ids))
            return
        for token_id in token_ids:  # one at a time: min_tokens counts tokens
            self._num_tokens += 1
            text = self._detokenizer.push((token_id,))
            self._pass_on(self._stops.feed(text, can_stop=self._can_stop()))

    def finish(self) -> None:
        """Releases all that was held back; no token follows."""
        text = self._detokenizer.finish()
        if self._stops is not None:
            text = self._stops.feed(text, can_stop=self._can_stop()) + self._stops.finish()
        self._pass_on(text)
        reasoning, tools = self._reasoning, self._tools
        if reasoning is not None:
            self._divide(reasoning.finish)
        if tools is not None:
            self._take_calls(tools.finish)

    def take(self, kind: str) -> str:
        """The text of one kind ("content" or "reasoning") that is new since the last call."""
        text = "".join(self._pieces[kind])
        self._pieces[kind].clear()
        return text

    def take_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that are new since the last call, numbered."""
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
            self._divide(lambda: parser.feed(text))
        elif self._sources.reasoning is None:
            self._answer(text)

    def _divide(self, settle: Callable[[], list[Segment]]) -> None:
        """Passes on the segments that `settle`, a call of the reasoning parser, gives."""

        def checked() -> list[Segment]:
            return [_checked_segment(segment) for segment in settle()]

        for segment in self._asked("reasoning", self._sources.reasoning, checked):
            if segment.kind == "reasoning":
                self._pieces["reasoning"].append(segment.text)
            elif segment.kind == "content" or self._tools is not None:
                self._answer(segment.text)

    def _answer(self, text: str) -> None:
        """Content, with calls in it where there is a tool parser."""
        parser = self._tools
        if parser is not None:
            self._take_calls(lambda: parser.feed(text))
        elif self._sources.tools is None:
            self._pieces["content"].append(text)

    def _take_calls(self, settle: Callable[[], list[str | ToolCall]]) -> None:
        """Collects what `settle`, a call of the tool parser, gives."""

        def checked() -> list[str | ToolCall]:
            return [_checked_item(item) for item in settle()]

        for item in self._asked("tool", self._sources.tools, checked):
            if isinstance(item, str):
                self._pieces["content"].append(item)
            else:
                self._calls.append(replace(item, index=self.num_calls))
                self.num_calls += 1

    def _start_parsers(self, request: Request) -> Sequence[str]:
        """Sets the parsers and gives their markers; `failure` when one cannot be built or
        started."""
        reasoning, tools = self._sources.reasoning, self._sources.tools
        markers: list[str] = []
        if reasoning is not None:
            create = partial(_started, reasoning, request.prompt_text)
            for parser in self._asked("reasoning", reasoning, create):
                self._reasoning = parser
                markers += parser.markers
        if tools is not None and self.failure is None:
            create_tools = partial(_started, tools, request.tools)
            for tool_parser in self._asked("tool", tools, create_tools):
                self._tools = tool_parser
                markers += tool_parser.markers
        return markers

    def _asked(
        self, kind: str, source: ParserSource[ParserT] | None, ask: Callable[[], list[T]]
    ) -> list[T]:
        """What a parser answers; nothing, and `failure`, when it raises."""
        assert source is not None
        try:
            return ask()
        except FAULTS as error:
            logger.warning("%s parser %s failed", kind, source.name, exc_info=error)
            self._reasoning = self._tools = None
            self.failure = RequestFailure(
                code=PluginError.code,
                message=f"{kind} parser {source.name} failed: {error_text(error)}; "
                "the text is given undivided",
            )
            return []


def _started(source: ParserSource[ParserT], given: Any) -> list[ParserT]:
    """A new parser that was told what comes before its text. Its markers are read here, too."""
    parser = source.create()
    parser.start(given)
    tuple(parser.markers)
    return [parser]


def _checked_segment(segment: object) -> Segment:
    if isinstance(segment, Segment) and segment.kind in KINDS:
        return segment
    raise PluginContractError(
        f"it gave {segment!r}; it must give a list of Segments of kind "
        "'content', 'reasoning' or 'tool_calls'"
    )


def _checked_item(item: object) -> str | ToolCall:
    if isinstance(item, str):
        return item
    if isinstance(item, ToolCall) and item.name and isinstance(item.arguments, str):
        return item
    raise PluginContractError(f"it gave {item!r}; it must give a list of texts and ToolCalls")
