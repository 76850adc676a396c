"""Checks that a chat template wrote every message of a conversation into the prompt.

Templates pass over what they do not know: a message of another role, calls of tools, a second
part. The model would answer as if nobody had said it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmdeploy_llm.errors import RequestError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

SHORT = 8  # characters of a text that may stand in a prompt by chance, as "hi" does in "this"
SIGN = "q7zx{}xz7q"  # begins and ends with letters, which templates neither strip nor escape


def with_known_roles(messages: Sequence[Message], template: str) -> Sequence[Message]:
    """Returns the messages with the role developer as system, its former name, for a template that
    does not know it (OpenAI's API reference: developer messages replace system messages)."""
    if "developer" in template:
        return messages
    return [
        {**message, "role": "system"} if message.get("role") == "developer" else message
        for message in messages
    ]


def check_complete(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    text: str,
    rendered: Callable[[Sequence[Message], Sequence[Tool]], str],
) -> None:
    """Raises RequestError for a message or tools that are not in a rendered prompt.

    A text that is not found as it is, in its place, may have been changed or moved: the messages
    are then rendered again with a sign after each text. A message without text is complete, and so
    is one of which the template leaves out the reasoning.

    text: the prompt that the messages gave. rendered: renders other messages and tools in the same
    way.
    """
    if tools and (untold := _untold(messages, tools, text, rendered)):
        raise RequestError(
            f"the chat template does not tell the model of the tools ({', '.join(untold[:5])}); "
            "give a chat_template for tools, or leave them out"
        )
    if _is_found(messages, text):
        return
    signs: dict[str, int] = {}
    signed = [_signed(message, index, signs) for index, message in enumerate(messages)]
    shown = rendered(signed, tools)
    left_out = next((index for sign, index in signs.items() if sign not in shown), None)
    if left_out is not None:
        raise RequestError(
            f"message {left_out}, of role {messages[left_out].get('role')!r}, or a part of it is "
            "not in the prompt: the chat template leaves it out; give it a role that the template "
            "knows, mostly system, user or assistant, or another chat_template"
        )


def _untold(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    text: str,
    rendered: Callable[[Sequence[Message], Sequence[Tool]], str],
) -> list[str]:
    """Returns the names of tools that are not in a rendered prompt. A name that is not found as
    JSON has it, or that a message may have brought there, is looked for with a sign after it."""
    names = [str(tool["function"]["name"]) for tool in tools]
    said = str(messages)
    if all(f'"{name}"' in text and name not in said for name in names):
        return []
    signs = [SIGN.format(f"t{index}") for index in range(len(names))]
    signed = [
        {**tool, "function": {**tool["function"], "name": name + sign}}
        for tool, name, sign in zip(tools, names, signs, strict=True)
    ]
    shown = rendered(messages, signed)
    return [name for name, sign in zip(names, signs, strict=True) if sign not in shown]


def _is_found(messages: Sequence[Message], text: str) -> bool:
    """Whether the texts of all messages stand in the prompt in their order, none too short."""
    position = 0
    for message in messages:
        for own in _texts(message):
            found = text.find(own, position) if len(own) >= SHORT else -1
            if found < 0:
                return False
            position = found + len(own)
    return True


def _texts(message: Message) -> Iterator[str]:
    content = message.get("content")
    parts = content if isinstance(content, (list, tuple)) else [{"text": content}]
    texts = (part.get("text") for part in parts)
    yield from (own.strip() for own in texts if isinstance(own, str) and own.strip())
    names = (_function(call).get("name") for call in message.get("tool_calls") or ())
    yield from (name for name in names if isinstance(name, str))


def _signed(message: Message, index: int, signs: dict[str, int]) -> Message:
    """Returns a message with a sign of its own after each of its texts. signs: sign -> index of
    the message, to which these are added."""

    def signed(text: Any) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        sign = SIGN.format(len(signs))
        signs[sign] = index
        return text.rstrip() + sign

    changed = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        changed["content"] = [
            {**part, "text": signed(part["text"])} if "text" in part else part for part in content
        ]
    else:
        changed["content"] = signed(content)
    if message.get("tool_calls"):
        changed["tool_calls"] = [_renamed(call, signed) for call in message["tool_calls"]]
    return changed


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _renamed(call: Mapping[str, Any], signed: Callable[[Any], Any]) -> Mapping[str, Any]:
    function = _function(call)
    renamed = {**function, "name": signed(function.get("name"))}
    return {**call, "function": renamed} if "function" in call else renamed
