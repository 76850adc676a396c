"""Reads a prompt of any form: text, token ids or messages, and the media that belong to it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.loading.forms import MEDIA_KEYS, media_items
from mmdeploy_llm.messages import MEDIA_KINDS, MediaItem
from mmdeploy_llm.values.deadline import Deadline, earlier
from mmdeploy_llm.values.text.display import shown
from mmdeploy_llm.values.text.spelling import meant

from .encodings import is_encoding, one_sequence

CONTENT_KEYS = ("prompt", "prompt_token_ids", "messages")
_A_MESSAGE = "a message is not a prompt; give {'messages': [...]}, or call chat() with the list"
_ADAPTER = 'name it: {"prompt": ..., "adapter": "name"}'
# Keys of prompts in other engines, and of messages -> what to write here.
ELSEWHERE = {
    "cache_salt": "leave it out: prefixes are kept in this process alone",
    "content": _A_MESSAGE,
    "decoder_prompt": "only the text before the answer is a prompt; use prompt",
    "encoder_prompt": "only the text before the answer is a prompt; use prompt",
    "lora_name": _ADAPTER,
    "lora_request": _ADAPTER,
    "multi_modal_uuids": "leave it out: items are known again by their content",
    "prompt_embeds": "embeddings are not accepted as prompts; give text or token ids",
    "role": _A_MESSAGE,
    "sampling_params": "give them as the second argument of the call, one for each prompt",
}
PROMPT_KEYS = (  # of a prompt's dict, and of a line of a batch
    *CONTENT_KEYS,
    *MEDIA_KEYS,
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
    "adapter",
    "priority",
    "timeout",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    """The parts of a prompt. Exactly one of text, ids and messages is given.

    media: the items of `multimodal_data`, unopened.
    processor_kwargs: options for all media of the prompt.
    tools: as the caller passed them.
    where: names the conversation in messages of errors, such as "conversation 3, ".
    hint: what would help where media have no placeholders.
    pair: the second text of a pair, which the tokenizer joins with the first.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: Any = None
    media: tuple[MediaItem, ...] = ()
    template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    processor_kwargs: Any = None
    tools: Any = None
    where: str = ""
    hint: str = ""
    pair: str | None = None


def read_prompt(prompt: Any, kinds: Sequence[str] = MEDIA_KINDS) -> PromptParts:
    """Reads a text, a list of token ids, a list of messages, or a dict with one of these or with a
    tokenizer's `input_ids`.

    kinds: known kinds of media. Raises RequestError for other types, unknown keys and kinds, and
        empty prompts. Changes nothing.
    """
    if isinstance(prompt, Mapping):
        return _read_dict(one_sequence(prompt) if is_encoding(prompt) else prompt, kinds)
    return PromptParts(**_content(prompt))


def hint_of_key(name: str, kinds: Sequence[str], known: Sequence[str] = PROMPT_KEYS) -> str:
    """Returns what to write instead of a key that does not exist. known: those that do."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name.removesuffix("s") in kinds or name in ("mm_data", "multimodal", "multi_modal"):
        return "did you mean 'multimodal_data', a dict such as {'image': [...]}?"
    near = meant(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"


def _read_dict(prompt: Mapping[str, Any], kinds: Sequence[str]) -> PromptParts:
    for name in prompt:
        if name not in PROMPT_KEYS:
            raise RequestError(
                f"the prompt dict has an unknown key {name!r}; {hint_of_key(str(name), kinds)}"
            )
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
    is_empty = isinstance(value, str) and not value
    is_alone = is_empty and bool(media and prompt[media[0]])  # enough for some encoders
    return PromptParts(
        **({"messages": value} if is_chat else {"text": ""} if is_alone else _content(value)),
        media=tuple(media_items(prompt[media[0]], kinds)) if media else (),
        template=prompt.get("chat_template"),
        template_kwargs=prompt.get("chat_template_kwargs"),
        processor_kwargs=prompt.get("mm_processor_kwargs"),
        tools=prompt.get("tools"),
    )


def priority_of(prompt: Any, default: int = 0) -> int:
    """Returns the prompt's own "priority", else the default. Raises RequestError unless it is a
    whole number of 64 bits."""
    own = prompt.get("priority") if isinstance(prompt, Mapping) else None
    priority = default if own is None else own
    if not _is_integer(priority) or not -(2**63) <= priority < 2**63:
        raise RequestError(
            f"priority must be a whole number of 64 bits, got {shown(priority)}; a smaller "
            "one is served first, 0 is the default"
        )
    return operator.index(priority)


def adapter_of(prompt: Any, default: str = "") -> str:
    """Returns the name of the prompt's own "adapter", else the default; "" for the model alone.
    Raises RequestError unless it is a text."""
    own = prompt.get("adapter") if isinstance(prompt, Mapping) else None
    name = default if own is None else own
    if not isinstance(name, str):
        raise RequestError(f"adapter must be the name of an adapter, got {shown(name)}")
    return name


def deadline_of(prompt: Any, timeout: Any = None) -> Deadline | None:
    """Returns the earlier deadline of `timeout` and of the prompt's own "timeout", from now on;
    None when there is none. Raises RequestError for a wrong one."""
    own = prompt.get("timeout") if isinstance(prompt, Mapping) else None
    one, other = (None if each is None else Deadline.after(each) for each in (timeout, own))
    return earlier(one, other)


def with_options(
    items: Sequence[MediaItem], kwargs: Any, kinds: Sequence[str]
) -> tuple[MediaItem, ...]:
    """Adds a prompt's mm_processor_kwargs to the options of its media; an item's own options win.

    Options that begin with a kind, such as video_fps, concern its items, which take them without
    that prefix; all others concern images. Raises RequestError for anything but a dict, and for
    options without an item that takes them.
    """
    if kwargs is None:
        return tuple(items)
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise RequestError(
            f"mm_processor_kwargs must be a dict with names of options, got {type(kwargs).__name__}"
        )
    by_kind: dict[str, dict[str, Any]] = {}
    prefixes = [kind for kind in kinds if kind != "image"]
    for name, value in kwargs.items():
        kind = next((kind for kind in prefixes if name.startswith(f"{kind}_")), "image")
        if not any(item.kind == kind for item in items):
            raise RequestError(
                f"mm_processor_kwargs sets {name!r}, but the prompt has no {kind}; remove it"
            )
        own = name if kind == "image" else name.removeprefix(f"{kind}_")
        by_kind.setdefault(kind, {})[own] = value
    return tuple(
        replace(item, options={**by_kind.get(item.kind, {}), **item.options}) for item in items
    )


def kwargs_of(kwargs: Any, kinds: Iterable[str]) -> tuple[Any, Any]:
    """Divides mm_processor_kwargs: returns those that begin with one of `kinds`, and the others;
    None where there are none. Anything but a dict counts as the others."""
    if not isinstance(kwargs, Mapping):
        return None, kwargs
    prefixes = tuple(f"{kind}_" for kind in kinds)
    own = {name for name in kwargs if isinstance(name, str) and name.startswith(prefixes)}
    rest = {name: kwargs[name] for name in kwargs if name not in own}
    return {name: kwargs[name] for name in own} or None, rest if rest or not own else None


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
