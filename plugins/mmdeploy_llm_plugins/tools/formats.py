"""A table of the formats of tool calls: the tags around a call, and how its body is read.

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
    """The tags around a call. is_part: the reader gets the tags as part of the body."""

    start: str
    end: str
    is_part: bool = False


HERMES = Tags(start="<tool_call>", end="</tool_call>")
# Qwen3-Coder sometimes omits the outer tags, or the first of them (vLLM's parser accepts it too).
BARE_FUNCTION = Tags(start="<function=", end="</function>", is_part=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of tool calls.

    name, aliases: what users write.
    tags: a call may be enclosed in any of these.
    bodies: the ways to write a call, tried in order.
    is_first: calls count only when nothing but white space comes before the first one.
    """

    name: str
    aliases: tuple[str, ...] = ()
    tags: tuple[Tags, ...] = (HERMES,)
    bodies: tuple[Body, ...] = ("json",)
    is_first: bool = False

    @property
    def key(self) -> str:
        """The name as a Python identifier."""
        return re.sub(r"\W", "_", self.name)

    @property
    def markers(self) -> tuple[str, ...]:
        """The start and end tags to look for."""
        return tuple(tag for tags in self.tags for tag in (tags.start, tags.end))


# The recipient of a message may come before its channel. <|call|> mostly ends the request too, and
# is then not part of the text.
MESSAGES = tuple(
    Tags(start=start, end="<|call|>", is_part=True)
    for start in ("<|start|>assistant", "<|channel|>", " to=functions.")
)

FORMATS = (
    # ERNIE 4.5 VL Thinking: FastDeploy reads calls only at the beginning of the answer.
    CallFormat(name="ernie-45-vl-thinking", is_first=True),
    CallFormat(name="ernie-x1", aliases=("ernie", "ernie45")),
    # Works after the reasoning parser gpt-oss, which reduces other messages to their text.
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
