"""Reads a prompt of any form: text, token ids or messages, and the media that belong to it."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem

from .media import media_items

CONTENT_KEYS = ("prompt", "prompt_token_ids", "messages")
MEDIA_KEYS = ("multimodal_data", "multi_modal_data")
KNOWN_KEYS = (*CONTENT_KEYS, *MEDIA_KEYS, "chat_template", "chat_template_kwargs", "tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    """The parts of a prompt. Exactly one of text, ids and messages is given.

    media: the items of `multimodal_data`, unopened.
    tools: as the caller passed them.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: Any = None
    media: tuple[MediaItem, ...] = ()
    template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    tools: Any = None


def read_prompt(prompt: Any, kinds: Sequence[str] = MEDIA_KINDS) -> PromptParts:
    """Reads a text, a list of token ids, a list of messages, or a dict with one of these.

    kinds: known kinds of media. Raises RequestError for other types, unknown keys and kinds, and
        empty prompts. Changes nothing.
    """
    if isinstance(prompt, Mapping):
        return _read_dict(prompt, kinds)
    return PromptParts(**_content(prompt))


def _read_dict(prompt: Mapping[str, Any], kinds: Sequence[str]) -> PromptParts:
    for name in prompt:
        if name not in KNOWN_KEYS:
            near = difflib.get_close_matches(str(name), KNOWN_KEYS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(KNOWN_KEYS)}"
            raise RequestError(f"the prompt dict has an unknown key {name!r}; {hint}")
    content = [name for name in CONTENT_KEYS if prompt.get(name) is not None]
    if len(content) != 1:
        raise RequestError(
            f"a prompt dict needs exactly one of {', '.join(CONTENT_KEYS)}; "
            f"found {' and '.join(content) or 'none'}"
        )
    media = [name for name in MEDIA_KEYS if prompt.get(name) is not None]
    if len(media) > 1:
        raise RequestError("a prompt dict takes multimodal_data or multi_modal_data, not both")
    is_chat = content == ["messages"]
    value = prompt[content[0]]
    return PromptParts(
        **({"messages": value} if is_chat else _content(value)),
        media=tuple(media_items(prompt[media[0]], kinds)) if media else (),
        template=prompt.get("chat_template"),
        template_kwargs=prompt.get("chat_template_kwargs"),
        tools=prompt.get("tools"),
    )


def _content(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        if not value:
            raise RequestError("the prompt is empty; give at least one character")
        return {"text": value}
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        return {"messages": value}
    return {"ids": _token_ids(value)}


def _token_ids(value: Any) -> tuple[int, ...]:
    """Returns a list, array or tensor of integers as a tuple of ints."""
    values = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise RequestError(
            f"a prompt must be a text, a list of token ids or a dict, got {type(value).__name__}"
        )
    if not values:
        raise RequestError("the prompt is empty; give at least one token id")
    try:
        return tuple(_token_id(item) for item in values)
    except TypeError:
        wrong = next(item for item in values if not _is_integer(item))
        raise RequestError(
            f"token ids must be whole numbers, found {type(wrong).__name__}; "
            "to pass several prompts, give a list of prompts"
        ) from None


def _token_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _is_integer(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def is_conversation(value: Any) -> bool:
    """Returns whether `value` is one list of message dicts."""
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and all(isinstance(item, Mapping) and "role" in item for item in value)


def as_prompt(prompt: Any) -> Any:
    """Returns a prompt; a conversation becomes {"messages": conversation}."""
    return {"messages": prompt} if is_conversation(prompt) else prompt
