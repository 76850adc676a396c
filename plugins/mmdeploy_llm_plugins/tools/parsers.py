"""The engine of all formats: finds calls between tags, whatever pieces the text comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

from mmdeploy_llm.hooks import ToolCall, ToolParser

from .formats import BARE_FUNCTION, FORMATS, HERMES, Body, CallFormat, Tags
from .readers import NoCallError, OpenTextError, Schemas, read_channel, read_json, read_xml

READERS: Mapping[Body, Callable[[str, Schemas], ToolCall]] = MappingProxyType(
    {"json": read_json, "xml": read_xml, "channel": read_channel}
)


class CallParser(ToolParser):
    """A tool parser that follows its `form`.

    A call that cannot be read, or that the end of the text truncates, is content, tags included; a
    call that lacks only its closing tag is read. White space before a call is dropped; after a call
    it is kept between two pieces of content.
    """

    form: ClassVar[CallFormat]

    def __init__(self) -> None:
        self._schemas: Schemas = {}
        self._buffer = ""  # unsettled text: an open call, or what may become a tag
        self._tags: Tags | None = None  # of the open call at the start of the buffer
        self._search = 0  # position in the buffer from which to look for the end of the open call
        self._is_stray = False  # whether an outer closing tag without its opening one may follow
        self._blanks = ""  # white space at the end of the content so far
        self._has_text = False  # whether there is content besides white space
        self._is_after_call = False  # whether the last thing found is a call
        self._num_calls = 0
        self._found: list[str | ToolCall] = []

    def start(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Reads the types of the parameters."""
        functions = [tool.get("function", {}) for tool in tools]
        self._schemas = {
            function["name"]: function.get("parameters") or {}
            for function in functions
            if "name" in function
        }

    def feed(self, text: str) -> list[str | ToolCall]:
        """Returns the texts and calls that the new text settles."""
        self._buffer += text
        while self._step():
            pass
        return self._take()

    def finish(self) -> list[str | ToolCall]:
        """Returns the texts and calls that were held back."""
        while self._tags is not None:
            self._close(self._tags)
            while self._step():
                pass
        self._content(self._buffer)
        self._buffer = ""
        if not (self._num_calls and self._is_after_call):
            self._give(self._blanks)
        self._blanks = ""
        return self._take()

    def _step(self) -> bool:
        """Advances by one tag; returns False when more text is needed."""
        if self._tags is not None:
            return self._read_on(self._tags)
        return not self._waits_for_stray() and self._look()

    def _look(self) -> bool:
        """Looks for the beginning of a call; returns whether there is one."""
        text = self._buffer
        found = [(text.find(tags.start), tags) for tags in self.form.tags if tags.start in text]
        position, tags = min(found, key=lambda item: item[0], default=(-1, HERMES))
        num_settled = position if found else len(text) - _num_open(text, self.form)
        self._content(text[:num_settled])
        if found and self.form.is_first and self._has_text and not self._num_calls:
            num_settled, found = len(text), []
            self._content(text[position:])
        self._buffer = text[num_settled:]
        if found:
            self._tags, self._search = tags, len(tags.start)
        return bool(found)

    def _read_on(self, tags: Tags) -> bool:
        """Looks for the end of the open call; returns False when more text is needed."""
        end = self._buffer.find(tags.end, self._search)
        if end < 0:
            self._search = max(len(tags.start), len(self._buffer) - len(tags.end) + 1)
            return False
        self._search = end + len(tags.end)
        inner = self._buffer[len(tags.start) : end]
        try:
            self._call(tags, self._buffer[: self._search] if tags.is_part else inner)
        except OpenTextError:
            return True  # this closing tag is part of a value; try the next one
        except NoCallError:
            self._no_call(tags)
        return True

    def _close(self, tags: Tags) -> None:
        """Ends an open call at the end of the text: accepts it if only its closing tag is missing.

        Otherwise its opening tag becomes content.
        """
        try:
            body = self._buffer if tags.is_part else self._buffer[len(tags.start) :]
            if not body.rstrip().endswith(("}", "</function>")):
                raise NoCallError("truncated")
            self._search = len(self._buffer)
            self._call(tags, body)
        except NoCallError:
            self._no_call(tags)

    def _call(self, tags: Tags, body: str) -> None:
        """Records the call that ends at `_search`. Raises NoCallError."""
        call = self._read(body)
        self._found.append(call)
        self._num_calls += 1
        self._blanks, self._is_after_call = "", True
        self._is_stray = tags is BARE_FUNCTION
        self._tags, self._buffer = None, self._buffer[self._search :]

    def _no_call(self, tags: Tags) -> None:
        """Turns the opening tag into content; another call may begin right after it."""
        self._content(tags.start)
        self._tags, self._buffer = None, self._buffer[len(tags.start) :]

    def _read(self, body: str) -> ToolCall:
        """Returns the call as the first reader that accepts it reads it. Raises NoCallError."""
        error = NoCallError("no reader")
        for kind in self.form.bodies:
            try:
                return READERS[kind](body, self._schemas)
            except NoCallError as problem:
                if not isinstance(error, OpenTextError):
                    error = problem
        raise error

    def _waits_for_stray(self) -> bool:
        """Drops an outer closing tag that was never opened; returns True while it may yet come."""
        if not self._is_stray:
            return False
        rest = self._buffer.lstrip()
        if len(rest) < len(HERMES.end) and HERMES.end.startswith(rest):
            return True
        self._is_stray = False
        if rest.startswith(HERMES.end):
            self._buffer = rest.removeprefix(HERMES.end)
        return False

    def _content(self, text: str) -> None:
        """Adds content and holds back the white space at its end."""
        text = self._blanks + text
        if self._num_calls and not self._has_text:
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        self._give(kept)

    def _give(self, text: str) -> None:
        if text:
            self._found.append(text)
            self._is_after_call = False
            self._has_text = self._has_text or not text.isspace()

    def _take(self) -> list[str | ToolCall]:
        found, self._found = self._found, []
        return found


def _num_open(text: str, form: CallFormat) -> int:
    """Returns the length of the longest end of `text` that may begin a call."""
    starts = [tags.start for tags in form.tags]
    for length in range(min(max(map(len, starts)) - 1, len(text)), 0, -1):
        if any(start.startswith(text[-length:]) for start in starts):
            return length
    return 0


def _parser_of(form: CallFormat) -> type[CallParser]:
    """Builds the parser class of one row of the table."""
    fields = {"form": form, "markers": form.markers, "__module__": __name__}
    fields["__doc__"] = f"The format {form.name!r} of the table."
    return type(f"CallParser({form.name})", (CallParser,), fields)


# formats.<key>: the parser classes of the table.
formats = SimpleNamespace(**{form.key: _parser_of(form) for form in FORMATS})
