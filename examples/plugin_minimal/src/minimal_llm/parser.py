"""The reasoning parser: `<notes>...</notes>` at the beginning of the text."""

from __future__ import annotations

from typing import Literal

from mmdeploy_llm.hooks import ReasoningParser, Segment

START, END = "<notes>", "</notes>"


class NotesParser(ReasoningParser):
    """Splits notes, if any, from the answer after them; without an end tag all text is notes."""

    markers = (START, END)
    start_marker = START
    end_marker = END

    def __init__(self) -> None:
        self._state: Literal["begin", "notes", "answer"] = "begin"
        self._held = ""  # text that may yet become a marker

    def start(self, prompt: str) -> None:
        """Starts in the notes if the prompt has opened them."""
        if prompt.rstrip().endswith(START):
            self._state = "notes"

    def feed(self, text: str) -> list[Segment]:
        """See ReasoningParser."""
        self._held += text
        if self._state == "begin":
            if START.startswith(self._held):
                return []
            self._state = "notes" if self._held.startswith(START) else "answer"
            self._held = self._held.removeprefix(START)
        notes = self._notes() if self._state == "notes" else ""
        answer = ""
        if self._state == "answer":
            answer, self._held = self._held, ""
        return _segments(notes, answer)

    def finish(self) -> list[Segment]:
        """See ReasoningParser."""
        if self._state == "begin" and self._held == START:
            self._held = ""
        held, self._held = self._held, ""
        return _segments(held, "") if self._state == "notes" else _segments("", held)

    def _notes(self) -> str:
        """Returns the notes that are settled; after their end the state is "answer"."""
        before, found, after = self._held.partition(END)
        if found:
            self._state, self._held = "answer", after
            return before
        num_held = max(n for n in range(len(END)) if before.endswith(END[:n]))
        settled = before[: len(before) - num_held]
        self._held = before[len(settled) :]
        return settled


def _segments(reasoning: str, content: str) -> list[Segment]:
    """Returns the segments that have text."""
    both = [Segment(kind="reasoning", text=reasoning), Segment(kind="content", text=content)]
    return [segment for segment in both if segment.text]
