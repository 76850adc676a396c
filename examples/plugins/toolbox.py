"""A toolbox in one file: a source of media, a logits processor, an observer, a command, a parser of
reasoning and a parser of tool calls. The command needs the file to be installed as a module."""

import json
import threading
from dataclasses import replace
from pathlib import Path

from mmdeploy_llm.hooks import (
    LogitsProcessor,
    LogitsProcessorSpec,
    ReasoningParser,
    ReasoningParserSpec,
    Segment,
    ToolCall,
    ToolParser,
    ToolParserSpec,
    hookimpl,
)

SHELF = Path(__file__).parents[1] / "images"  # where shelf:// addresses lead


@hookimpl
def provide_logits_processors():
    """Lists a processor that bans tokens."""
    return [LogitsProcessorSpec(name="ban", factory=f"{__name__}:Ban", arguments=("banned",))]


@hookimpl
def provide_reasoning_parsers():
    """Lists a parser of texts such as "why ==> answer"."""
    return [ReasoningParserSpec(name="arrow", factory=f"{__name__}:ArrowParser")]


@hookimpl
def provide_tool_parsers():
    """Lists a parser of texts such as <call>{"name": "f", "arguments": {}}</call>."""
    return [ToolParserSpec(name="call-tags", factory=f"{__name__}:CallParser")]


@hookimpl
def fetch_media(ref, limits):
    """Reads shelf://NAME; all other addresses are left to other plugins."""
    if ref.scheme != "shelf":
        return None
    from mmdeploy_llm.media import read_beneath  # no path and no link leads out of the folder

    path = SHELF / ref.uri.partition("://")[2]
    return read_beneath(path, replace(limits, allowed_root=SHELF), name=ref.uri)


class Tally:
    """Counts requests and generated tokens of all engines; several threads may write."""

    def __init__(self):
        self._lock = threading.Lock()
        self.requests = self.tokens = 0

    def add(self, tokens):
        """Counts one request."""
        with self._lock:
            self.requests += 1
            self.tokens += tokens


TALLY = Tally()


@hookimpl
def on_request_finished(record):
    """Counts every request, also one that failed."""
    TALLY.add(record.num_output_tokens)


@hookimpl
def extend_cli(app):
    """Adds `mmdeploy-llm shelf`."""

    @app.command()
    def shelf() -> None:
        """List what shelf:// addresses name."""
        print("\n".join(sorted(path.name for path in SHELF.iterdir())))


class Ban(LogitsProcessor):
    """Bans the tokens that the argument `banned` lists."""

    def __init__(self, context):
        self._vocab_size = context.vocab_size

    def check(self, arguments):
        """Raises ValueError unless `banned` is a list of token ids."""
        banned = arguments.get("banned", [])
        is_list = isinstance(banned, list) and all(type(token) is int for token in banned)
        if not is_list or not all(0 <= token < self._vocab_size for token in banned):
            raise ValueError(f"banned must list ids below {self._vocab_size}, got {banned!r}")

    def apply(self, logits, rows):
        """Changes each request's own row."""
        for number, row in enumerate(rows):
            logits[number, row.arguments.get("banned", [])] = float("-inf")
        return logits


def beginning_of(marker, text):
    """Returns how many characters at the end of the text may be the beginning of the marker."""
    return max(size for size in range(len(marker)) if text.endswith(marker[:size]))


class ArrowParser(ReasoningParser):
    """Everything before the first ==> is reasoning."""

    end_marker = "==>"
    markers = (end_marker,)

    def __init__(self):
        self._kind, self._held = "reasoning", ""

    def feed(self, text):
        """Returns what is certain; holds back what may become the arrow."""
        if self._kind == "content":
            return [Segment(kind="content", text=text)] if text else []
        before, found, after = (self._held + text).partition(self.end_marker)
        keep = 0 if found else beginning_of(self.end_marker, before)
        settled, self._held = before[: len(before) - keep], before[len(before) - keep :]
        segments = [Segment(kind="reasoning", text=settled)] if settled else []
        if found:
            self._kind = "content"
            segments += self.feed(after)
        return segments

    def finish(self):
        """Returns what was held back."""
        held, self._held = self._held, ""
        return [Segment(kind=self._kind, text=held)] if held else []


class CallParser(ToolParser):
    """Reads calls between tags; what is no call stays content."""

    markers = START, END = "<call>", "</call>"

    def __init__(self):
        self._held = ""

    def feed(self, text):
        """Returns the text and the calls that are complete."""
        self._held += text
        return [part for part in self._parts(is_end=False) if part]

    def finish(self):
        """Returns what was held back."""
        return [part for part in self._parts(is_end=True) if part]

    def _parts(self, *, is_end):
        while self.END in self._held.partition(self.START)[2]:
            before, _, rest = self._held.partition(self.START)
            body, _, self._held = rest.partition(self.END)
            yield before
            yield self._call(body) or f"{self.START}{body}{self.END}"
        text = self._held
        begin = text.find(self.START)
        if begin < 0:
            begin = len(text) - beginning_of(self.START, text)
        begin = len(text) if is_end else begin
        self._held = text[begin:]
        yield text[:begin]

    @staticmethod
    def _call(body):
        try:
            name, arguments = (json.loads(body)[key] for key in ("name", "arguments"))
        except (ValueError, TypeError, KeyError):
            return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return ToolCall(name=name, arguments=json.dumps(arguments))
