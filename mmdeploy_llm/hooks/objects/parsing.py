"""The classes that parsers of generated text implement, of reasoning and of tool calls. Imports no
torch."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from mmdeploy_llm.values.outputs.request_output import ToolCall

PROBE = "0"  # a text that no parser takes for a marker


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of generated text with its kind.

    "tool_calls" is the text of tool calls that a family keeps apart from its answer. The tool
    parser gets it; without a tool parser it is dropped.
    """

    kind: Literal["reasoning", "content", "tool_calls"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NextText:
    """How a reasoning parser reads the text that comes next, for constraints on the answer.

    kind: "free": as thinking; nothing is constrained. "answer": the constraint holds from here on.
        "tag": as something that stands between thinking and answer, where only a tag may come.
    tags: the tags of kind "tag"; of "answer", those that may come instead of the answer, such as
        the one that opens the thinking. blanks: characters that may come before them.
    """

    kind: Literal["free", "answer", "tag"]
    tags: tuple[str, ...] = ()
    blanks: str = ""


class ReasoningParser(ABC):
    """Splits the text of one request into reasoning and content. One instance serves one request.

    The result does not depend on how the text is split into `feed` calls.

    markers: texts that the parser looks for. A token with exactly such a text reaches the parser
        even when special tokens are skipped.
    start_marker: the text by which a prompt opens the reasoning. A prompt with `end_marker` after
        its last `start_marker` has closed it, and `reasoning_max_tokens` then forces nothing. None:
        a prompt says nothing about the reasoning, for example because it quotes the markers.
    end_marker: the text that ends the reasoning; `reasoning_max_tokens` forces it, and an answer
        that keeps a constraint never contains it.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    start_marker: ClassVar[str | None] = None
    end_marker: ClassVar[str | None] = None

    def start(self, prompt: str) -> None:  # noqa: B027 - optional to override
        """Called once, before any text, with the rendered prompt, which may have opened or
        closed the reasoning."""

    @abstractmethod
    def feed(self, text: str) -> list[Segment]:
        """Returns the segments that the new text completes; text that may yet become a marker is
        held back."""

    @abstractmethod
    def finish(self) -> list[Segment]:
        """Returns what was held back, after the last text."""

    def next_text(self) -> NextText:
        """Returns how the next text is read. A constraint on the answer asks after every token of
        the thinking.

        By default this is tried out on copies of the parser: thinking is what ends as reasoning,
        and `start_marker` may come instead of an answer where it opens reasoning."""
        if self._last_kind(PROBE) == "reasoning":
            return NextText(kind="free")
        start = self.start_marker
        if not start or self._last_kind(start + PROBE) != "reasoning":
            return NextText(kind="answer")
        may_wait = self._last_kind(f"\n{start}{PROBE}") == "reasoning"
        return NextText(kind="answer", tags=(start,), blanks=" \n" if may_wait else "")

    @final
    def parse(self, text: str) -> list[Segment]:
        """Parses a complete text at once: `feed`, then `finish`."""
        return self.feed(text) + self.finish()

    def _last_kind(self, text: str) -> str:
        segments = copy.deepcopy(self).parse(text)
        return segments[-1].kind if segments else "content"


class ToolParser(ABC):
    """Extracts the tool calls from the content of one request. One instance serves one request.

    The result does not depend on how the text is split into `feed` calls. A call is returned as
    soon as it is complete; text that turns out to be no call is returned as content, so that
    nothing is lost.

    markers: texts that the parser looks for. A token with exactly such a text reaches the parser
        even when special tokens are skipped.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def start(self, tools: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 - optional
        """Called once, before any text, with the request's tools, () when it has none."""

    @abstractmethod
    def feed(self, text: str) -> list[str | ToolCall]:
        """Returns the content and calls, in order, that the new text completes."""

    @abstractmethod
    def finish(self) -> list[str | ToolCall]:
        """Returns what was held back, after the last text."""

    @final
    def parse(self, text: str) -> list[str | ToolCall]:
        """Parses a complete text at once: `feed`, then `finish`."""
        return self.feed(text) + self.finish()
