"""Formats of tool calls as a table: the tags around a call, and how what is between them is read.

    json    {"name": "f", "arguments": {"x": 1}}
    xml     <function=f> <parameter=x> 1 </parameter> </function>
    channel ...<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}

Sources: FastDeploy's tool parsers (ERNIE); the chat templates of Qwen2.5, Qwen3 and Qwen3-Coder and
vLLM's parsers hermes and qwen3_coder; OpenAI's cookbook, articles/openai-harmony.md (gpt-oss).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Body = Literal["json", "xml", "channel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What a call stands between. is_part: the tags are part of what is read, too."""

    start: str
    end: str
    is_part: bool = False


HERMES = Tags(start="<tool_call>", end="</tool_call>")
# Qwen3-Coder at times forgets the outer tags, or the first of them (vLLM's parser takes that too).
BARE_FUNCTION = Tags(start="<function=", end="</function>", is_part=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of calls.

    name, aliases: what users write. tags: where a call stands; any of them. bodies: how it can be
    written, tried in order. is_first: calls count only where no other text than white space stands
    before the first.
    """

    name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[Tags, ...] = (HERMES,)
    bodies: tuple[Body, ...] = ("json",)
    is_first: bool = False

    @property
    def key(self) -> str:
        """The name as Python spells names."""
        return re.sub(r"\W", "_", self.name)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts to look for."""
        return tuple(tag for tags in self.tags for tag in (tags.start, tags.end))


# The recipient of a message may stand before its channel. What ends the message ends the request
# too, mostly, and is no text then.
MESSAGES = tuple(
    Tags(start=start, end="<|call|>", is_part=True)
    for start in ("<|start|>assistant", "<|channel|>", " to=functions.")
)

FORMATS = (
    # ERNIE 4.5 VL Thinking: FastDeploy takes calls only at the beginning of the answer.
    CallFormat(name="ernie-45-vl-thinking", is_first=True),
    CallFormat(name="ernie-x1", aliases=("ernie", "ernie45")),
    # Behind the reasoning parser gpt-oss, which leaves nothing of other messages but their text.
    CallFormat(
        name="gpt-oss",
        aliases=("gptoss", "harmony", "openai"),
        tags=MESSAGES,
        bodies=("channel",),
    ),
    CallFormat(name="hermes", aliases=("qwen2.5", "qwen25", "qwen3")),
    CallFormat(
        name="qwen3-coder",
        aliases=("qwen3-xml", "qwen3.5"),
        tags=(HERMES, BARE_FUNCTION),
        bodies=("xml",),
    ),
    # Checkpoints of one architecture differ in their format (Qwen3-Coder is a Qwen3 MoE).
    CallFormat(name="qwen", tags=(HERMES, BARE_FUNCTION), bodies=("json", "xml")),
)
