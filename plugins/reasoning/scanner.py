"""The one engine behind all tag parsers: walks a Grammar, whatever pieces the text comes in."""

from __future__ import annotations

from typing import ClassVar, Literal

from mmdeploy_llm.hooks import ReasoningParser, Segment

from .grammar import Decided, Grammar, Mode


class TagParser(ReasoningParser):
    """A reasoning parser that follows its `grammar`.

    No character is lost but the tags and what the grammar drops or strips. Text that may become a
    tag, blanks that decide nothing and undecided text are held back.
    """

    grammar: ClassVar[Grammar]

    def __init__(self) -> None:
        self._buffer = ""  # not scanned yet: the beginning of a tag, or blanks
        self._held: list[str] = []  # text of a "held" mode
        self._spaces = ""  # at the end of a stripped mode's text so far
        self._has_text = False  # whether a stripped mode has text yet
        self._segments: list[Segment] = []
        self._mode = self.grammar.modes[self.grammar.default]

    def start(self, prompt: str) -> None:
        """Takes the state from the last tag in the prompt."""
        self._mode = self.grammar.modes[self.grammar.entry(prompt)]

    def feed(self, text: str) -> list[Segment]:
        """What the new text settles."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[Segment]:
        """The rest; undecided text is content."""
        while self._mode.blanks is not None:
            self._mode = self.grammar.modes[self._mode.otherwise]
            while self._step():
                pass
        self._emit(self._buffer)
        self._buffer = ""
        self._settle("content")
        return self._take()

    def _step(self) -> bool:
        """Goes on by one mode; False when more text is needed."""
        return self._scan() if self._mode.blanks is None else self._look()

    def _scan(self) -> bool:
        mode, text = self._mode, self._buffer
        found = [(text.find(tag), tag) for tag in mode.exits if tag in text]
        if not found:
            num_open = _num_open(text, mode)
            self._emit(text[: len(text) - num_open])
            self._buffer = text[len(text) - num_open :]
            return False
        place, tag = min(found)
        self._emit(text[:place])
        self._leave(mode, tag, text[place + len(tag) :])
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
        way = mode.exits[tag]
        self._settle(way.held)
        self._spaces, self._has_text = "", False
        self._mode = self.grammar.modes[way.mode]
        self._buffer = rest
        if way.is_kept:
            self._emit(tag)

    def _emit(self, text: str) -> None:
        """Text of the present mode."""
        mode = self._mode
        if mode.kind == "held":
            self._held.append(text)
        elif mode.kind != "dropped":
            self._add(mode.kind, self._strip(text) if mode.is_stripped else text)

    def _settle(self, kind: Decided) -> None:
        """The held text is of this kind."""
        text = "".join(self._held)
        self._held.clear()
        is_stripped = self._mode.is_stripped and kind == "reasoning"
        self._add(kind, text.strip() if is_stripped else text)

    def _strip(self, text: str) -> str:
        """`text` without white space at the mode's beginning; that at the end waits for more."""
        text = self._spaces + text
        if not self._has_text:
            text = text.lstrip()
        kept = text.rstrip()
        self._spaces = text[len(kept) :]
        self._has_text = self._has_text or bool(kept)
        return kept

    def _add(self, kind: Decided | Literal["tool_calls"], text: str) -> None:
        if text:
            self._segments.append(Segment(kind=kind, text=text))

    def _take(self) -> list[Segment]:
        segments, self._segments = self._segments, []
        return segments


def _num_open(text: str, mode: Mode) -> int:
    """Length of the longest end of `text` with which a tag of the mode begins."""
    longest = max(map(len, mode.exits), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in mode.exits):
            return length
    return 0
