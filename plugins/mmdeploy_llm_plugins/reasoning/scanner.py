"""The engine of all tag parsers: walks a Grammar, whatever pieces the text comes in."""

from __future__ import annotations

from collections.abc import Iterator
from string import whitespace
from typing import ClassVar, Literal

from mmdeploy_llm.hooks import NextText, ReasoningParser, Segment

from .grammar import Decided, Grammar, Mode


class TagParser(ReasoningParser):
    """A reasoning parser that follows its `grammar`.

    Only tags, and what the grammar drops or strips, are lost. Text that may become a tag, blanks
    before a decision and undecided text are held back.
    """

    grammar: ClassVar[Grammar]

    def __init__(self) -> None:
        self._buffer = ""  # unread text: blanks, or what may become a tag
        self._held: list[str] = []  # text of a "held" mode
        self._spaces: dict[str, str] = {}  # kind -> white space at the end of its text so far
        self._has_text: set[str] = set()  # kinds that have text yet
        self._segments: list[Segment] = []
        self._mode = self.grammar.modes[self.grammar.default]
        self._is_decided = False  # whether the prompt has opened or closed the thinking

    def start(self, prompt: str) -> None:
        """Sets the first mode by the last tag in the prompt."""
        entry = self.grammar.entry(prompt)
        self._mode, self._is_decided = self.grammar.modes[entry.mode], entry.is_decided

    def feed(self, text: str) -> list[Segment]:
        """Returns the segments that the new text settles."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[Segment]:
        """Returns the segments that were held back; undecided text is content."""
        while self._mode.blanks is not None:
            self._mode = self.grammar.modes[self._mode.otherwise]
            while self._step():
                pass
        self._emit(self._buffer)
        self._buffer = ""
        self._settle("content")
        return self._take()

    def next_text(self) -> NextText:
        """Returns how the next text is read: by the mode that it reaches, after tags that may come
        before it."""
        mode, blanks = self._mode, ""
        tags = [*self._tags(mode)]
        while mode.blanks is not None:
            blanks, mode = blanks or mode.blanks, self.grammar.modes[mode.otherwise]
            tags += self._tags(mode)
        found = tuple(dict.fromkeys(tags))
        if mode.kind == "reasoning":
            return NextText(kind="free")
        if mode.kind == "dropped":
            return NextText(kind="tag", tags=found, blanks=whitespace)
        return NextText(kind="answer", tags=found, blanks=blanks)

    def _tags(self, mode: Mode) -> Iterator[str]:
        """Yields the tags that may come in place of a mode's text, at its beginning. One that opens
        the thinking may not where the prompt has closed it."""
        is_over = mode.kind == "content" and mode.blanks is None
        for tag, leaving in () if is_over else mode.exits.items():
            is_first = mode.kind != "held" or leaving.held == "content"
            is_closed = self._is_decided and self._reached(leaving.mode).kind == "reasoning"
            if is_first and not leaving.is_kept and not is_closed:
                yield tag

    def _reached(self, name: str) -> Mode:
        """Returns the mode of text that no tag precedes."""
        mode = self.grammar.modes[name]
        return mode if mode.blanks is None else self._reached(mode.otherwise)

    def _step(self) -> bool:
        """Advances by one mode; returns False when more text is needed."""
        return self._scan() if self._mode.blanks is None else self._look()

    def _scan(self) -> bool:
        mode, text = self._mode, self._buffer
        found = [(text.find(tag), tag) for tag in mode.exits if tag in text]
        if not found:
            num_open = _num_open(text, mode)
            self._emit(text[: len(text) - num_open])
            self._buffer = text[len(text) - num_open :]
            return False
        position, tag = min(found)
        self._emit(text[:position])
        self._leave(mode, tag, text[position + len(tag) :])
        return True

    def _look(self) -> bool:
        mode = self._mode
        rest = self._buffer.lstrip(mode.blanks)
        if any(tag.startswith(rest) and tag != rest for tag in mode.exits):
            return False
        for tag in mode.exits:
            if rest.startswith(tag):
                self._emit(self._buffer[: -len(rest)])
                self._leave(mode, tag, rest.removeprefix(tag))
                return True
        self._mode = self.grammar.modes[mode.otherwise]
        return True

    def _leave(self, mode: Mode, tag: str, rest: str) -> None:
        leaving = mode.exits[tag]
        self._settle(leaving.held)
        if self._reached(leaving.mode).kind == "reasoning":
            self._keep_spaces(mode)
        self._spaces.pop(mode.kind, None)
        self._mode = self.grammar.modes[leaving.mode]
        self._buffer = rest
        if leaving.is_kept:
            self._emit(tag)

    def _emit(self, text: str) -> None:
        """Adds text of the current mode: to the held text, or to the segments; drops the rest."""
        mode = self._mode
        if mode.kind == "held":
            self._held.append(text)
        elif mode.kind != "dropped":
            self._add(mode.kind, self._strip(text) if mode.is_stripped else text)

    def _settle(self, kind: Decided) -> None:
        """Releases the held text as this kind."""
        text = "".join(self._held)
        self._held.clear()
        is_stripped = self._mode.is_stripped and kind == "reasoning"
        if text.strip():
            self._has_text.add(kind)
        self._add(kind, text.strip() if is_stripped else text)

    def _strip(self, text: str) -> str:
        """Drops white space at the beginning of all text of the mode's kind, and holds back white
        space at the end."""
        kind = self._mode.kind
        text = self._spaces.get(kind, "") + text
        if kind not in self._has_text:
            text = text.lstrip()
        kept = text.rstrip()
        self._spaces[kind] = text[len(kept) :]
        if kept:
            self._has_text.add(kind)
        return kept

    def _keep_spaces(self, left: Mode) -> None:
        """Settles the white space at the end of content, which may go on after more thinking."""
        if left.kind == "content" and left.kind in self._has_text:
            self._add("content", self._spaces.get(left.kind, ""))

    def _add(self, kind: Decided | Literal["tool_calls"], text: str) -> None:
        if text:
            self._segments.append(Segment(kind=kind, text=text))

    def _take(self) -> list[Segment]:
        segments, self._segments = self._segments, []
        return segments


def _num_open(text: str, mode: Mode) -> int:
    """Returns the length of the longest end of `text` that may begin a tag of the mode."""
    longest = max(map(len, mode.exits), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in mode.exits):
            return length
    return 0
