"""The parser of gpt-oss: messages in channels, as OpenAI's harmony format has them.

    <|start|>assistant<|channel|>analysis<|message|>why<|end|>       reasoning
    <|start|>assistant<|channel|>final<|message|>so<|return|>        content
    <|start|>assistant<|channel|>commentary<|message|>first<|end|>   content: said to the user
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
                                                                     a tool call

The prompt ends with `<|start|>assistant`; a recipient may stand before the channel, too. Source:
OpenAI's cookbook, articles/openai-harmony.md.
"""

from __future__ import annotations

import re
from typing import Literal

from mmdeploy_llm.hooks import ReasoningParser, Segment

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
IN_HEADER = (CHANNEL, CONSTRAIN)
TOKENS = (START, *IN_HEADER, MESSAGE, *ENDS)
TO_FINAL = f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}"

_TOKEN = re.compile("|".join(map(re.escape, TOKENS)))
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=\S")

Kind = Literal["reasoning", "content", "tool_calls"]


class HarmonyParser(ReasoningParser):
    """gpt-oss: the analysis channel is reasoning, messages to tools are tool calls, with their
    headers; all else is content.

    A header is read from what the prompt ends with and what is generated. One that is not finished
    is no text; where none was begun, the text is content. The prompt holds the final channels of
    earlier turns, so a TO_FINAL in it does not close this turn's reasoning: no `start_marker`.
    """

    markers = (*TOKENS, TO_FINAL)
    end_marker = TO_FINAL

    def __init__(self) -> None:
        self._buffer = ""  # not read yet: the beginning of a token
        self._lead = ""  # of the header: its part in the prompt, or the token that began it
        self._is_prompted = True  # whether `_lead` is of the prompt
        self._header: list[str] = []  # of the header: what was generated behind `_lead`
        self._kind: Kind | None = None  # of the message that is open; None: in a header
        self._segments: list[Segment] = []

    def start(self, prompt: str) -> None:
        """Takes the header, or the open message, that the prompt ends with."""
        place = prompt.rfind(START)
        if place >= 0:
            self._text(self._scan(prompt[place:]))
        self._lead += "".join(self._header)
        self._is_prompted = True
        self._header.clear()
        self._segments.clear()

    def feed(self, text: str) -> list[Segment]:
        """What the new text settles."""
        rest = self._scan(self._buffer + text)
        num_settled = len(rest) - _num_open(rest)
        self._text(rest[:num_settled])
        self._buffer = rest[num_settled:]
        return self._take()

    def finish(self) -> list[Segment]:
        """The rest."""
        self._text(self._buffer)
        self._buffer = ""
        self._leave_header()
        return self._take()

    def _scan(self, text: str) -> str:
        """Reads up to the last whole token; gives what stands behind it."""
        place = 0
        for found in _TOKEN.finditer(text):
            self._text(text[place : found.start()])
            self._token(found[0])
            place = found.end()
        return text[place:]

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
            if self._kind == "tool_calls":
                self._add("tool_calls", token)
            self._kind = "content"  # nothing stands between messages but what is out of order
        elif token == MESSAGE and is_header:
            self._open("".join(self._header))
        else:
            self._text(token)

    def _open(self, generated: str) -> None:
        """A message begins. generated: its header without `_lead`."""
        header = self._lead + generated
        channel = _CHANNEL.search(header)
        self._kind = "content"
        if _RECIPIENT.search(header):
            self._kind = "tool_calls"
            self._add("tool_calls", (generated if self._is_prompted else header) + MESSAGE)
        elif channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"
        self._lead = ""
        self._header.clear()

    def _leave_header(self) -> None:
        """A header that no message follows."""
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
    """Length of the end of `text` with which a token begins."""
    place = text.rfind("<")
    end = text[place:] if place >= 0 else ""
    return len(end) if end and any(token.startswith(end) for token in TOKENS) else 0
