"""The parser of gpt-oss, which writes messages in channels (OpenAI's harmony format).

    <|start|>assistant<|channel|>analysis<|message|>why<|end|>       reasoning
    <|start|>assistant<|channel|>final<|message|>so<|return|>        content
    <|start|>assistant<|channel|>commentary<|message|>first<|end|>   content: said to the user
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
                                                                     a tool call

The prompt ends with `<|start|>assistant`; a recipient may also come before the channel. Source:
OpenAI's cookbook, articles/openai-harmony.md.
"""

from __future__ import annotations

import re
from typing import Literal

from mmdeploy_llm.hooks import NextText, ReasoningParser, Segment

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
IN_HEADER = (CHANNEL, CONSTRAIN)
TOKENS = (START, *IN_HEADER, MESSAGE, *ENDS)
TO_FINAL = f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}"
HEADERS = tuple(f"{CHANNEL}{channel}{MESSAGE}" for channel in ("analysis", "final"))

_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=\S")

Kind = Literal["reasoning", "content", "tool_calls"]


class HarmonyParser(ReasoningParser):
    """gpt-oss: the analysis channel is reasoning; messages to tools are tool calls and keep their
    headers; all else is content.

    A header may begin in the prompt and continue in the generated text. An unfinished header is
    dropped; text without any header is content. The prompt holds the final channels of earlier
    turns, so a TO_FINAL in it does not close this turn's reasoning: there is no `start_marker`.
    """

    markers = (*TOKENS, TO_FINAL)
    end_marker = TO_FINAL

    def __init__(self) -> None:
        self._buffer = ""  # unread text that may become a token
        self._lead = ""  # start of the header: its text in the prompt, or the token that began it
        self._is_prompted = True  # whether `_lead` comes from the prompt
        self._header: list[str] = []  # the header as generated after `_lead`
        self._kind: Kind | None = None  # of the open message; None inside a header
        self._is_final = False  # whether the open message is the answer
        self._segments: list[Segment] = []

    def start(self, prompt: str) -> None:
        """Reads the header or the open message at the end of the prompt."""
        position = prompt.rfind(START)
        if position >= 0:
            self._text(self._scan(prompt[position:]))
        self._lead += "".join(self._header)
        self._is_prompted = True
        self._header.clear()
        self._segments.clear()

    def feed(self, text: str) -> list[Segment]:
        """Returns the segments that the new text settles."""
        rest = self._scan(self._buffer + text)
        num_settled = len(rest) - _num_open(rest)
        self._text(rest[:num_settled])
        self._buffer = rest[num_settled:]
        return self._take()

    def finish(self) -> list[Segment]:
        """Returns the segments that were held back."""
        self._text(self._buffer)
        self._buffer = ""
        self._leave_header()
        return self._take()

    def next_text(self) -> NextText:
        """Returns how the next text is read. The answer is the final channel: before it only
        thinking may come, no call and no remark. Text without any header is an answer too."""
        if self._kind == "reasoning":
            return NextText(kind="free")
        if self._is_final:
            return NextText(kind="answer")
        if self._kind is not None:  # between messages
            headers = tuple(f"{START}assistant{header}" for header in HEADERS)
            return NextText(kind="tag", tags=headers)
        begun = self._lead.removeprefix(f"{START}assistant") + "".join(self._header)
        rest = tuple(h.removeprefix(begun) for h in HEADERS if h.startswith(begun))
        return NextText(kind="tag" if self._lead else "answer", tags=rest or HEADERS)

    def _scan(self, text: str) -> str:
        """Reads up to the end of the last whole token; returns the text after it."""
        position = 0
        for found in _TOKEN.finditer(text):
            self._text(text[position : found.start()])
            self._token(found[0])
            position = found.end()
        return text[position:]

    def _text(self, text: str) -> None:
        if self._kind is None:
            self._header.append(text)
        else:
            self._add(self._kind, text)

    def _token(self, token: str) -> None:
        is_header = self._kind is None
        if token == START or (token == CHANNEL and not is_header):
            self._leave_header()
            self._kind, self._lead, self._is_prompted = None, token, False
        elif token in ENDS:
            self._leave_header()
            self._is_final = False
            if self._kind == "tool_calls":
                self._add("tool_calls", token)
            self._kind = "content"  # for text between messages, which the format does not allow
        elif token == MESSAGE and is_header:
            self._open("".join(self._header))
        else:
            self._text(token)

    def _open(self, generated: str) -> None:
        """Opens a message. generated: its header without `_lead`."""
        header = self._lead + generated
        channel = _CHANNEL.search(header)
        self._kind = "content"
        if _RECIPIENT.search(header):
            self._kind = "tool_calls"
            self._add("tool_calls", (generated if self._is_prompted else header) + MESSAGE)
        elif channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"
        else:
            self._is_final = channel is None or channel[1] == "final"
        self._lead = ""
        self._header.clear()

    def _leave_header(self) -> None:
        """Drops a header that no message follows; generated text without a channel is content."""
        text = "".join(self._header)
        self._header.clear()
        if self._kind is None and self._is_prompted and CHANNEL not in self._lead + text:
            self._add("content", text)
        self._lead = ""

    def _add(self, kind: Kind, text: str) -> None:
        if text:
            self._segments.append(Segment(kind=kind, text=text))

    def _take(self) -> list[Segment]:
        segments, self._segments = self._segments, []
        return segments


def _num_open(text: str) -> int:
    """Returns the length of the end of `text` that may be the beginning of a token."""
    position = text.rfind("<")
    end = text[position:] if position >= 0 else ""
    return len(end) if end and any(token.startswith(end) for token in TOKENS) else 0
