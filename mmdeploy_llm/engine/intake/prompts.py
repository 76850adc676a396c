"""PromptReader: reads a prompt of any form: text, token ids or messages, and its media.

whatever a caller passes, a line of a batch --> PromptReader --> PromptParts, for batches, records,
                                                                 digests, tars and the intake
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks.kinds import KindTable, table_of
from mmdeploy_llm.media.loading.expanding import PartExpander
from mmdeploy_llm.media.loading.forms import MEDIA_KEYS, changed, media_items
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.deadline import Deadline, earlier
from mmdeploy_llm.values.prompt import ChatMessage, MediaPart, OpenPart, Part, PromptParts
from mmdeploy_llm.values.text.display import shown
from mmdeploy_llm.values.text.spelling import meant

from .chat import PartReader
from .encodings import is_encoding, listed, one_sequence

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
class PromptReader:
    """The one reader of prompts: makes PromptParts of any form.

    What knows no model, such as a batch, reads parts of messages that need it as OpenParts, and the
    model's reader takes such PromptParts as a prompt, and reads the rest.

    kinds: known kinds of media. parts: reads messages.
    """

    kinds: Sequence[str]
    parts: PartReader

    @classmethod
    def of_model(cls, media: ModelMedia, expander: PartExpander | None = None) -> PromptReader:
        """Returns the reader of a model's prompts."""
        own = PartExpander(table_of(())) if expander is None else expander
        parts = PartReader(kind_of=media.kind_of_part, types=media.types, expander=own)
        return cls(kinds=media.kinds, parts=parts)

    @classmethod
    def of_kinds(cls, kinds: KindTable) -> PromptReader:
        """Returns a reader that knows the kinds of media alone."""
        own = PartExpander(kinds)
        parts = PartReader(kind_of=kinds.of_part, types=(), expander=own, is_final=False)
        return cls(kinds=kinds.kinds, parts=parts)

    def read(self, prompt: Any, where: str = "", deadline: Deadline | None = None) -> PromptParts:
        """Reads a text, a list of token ids, a list of messages, a dict with one of these or with a
        tokenizer's `input_ids` or with media alone, or what another reader read.

        where, deadline: see PartReader.messages. Raises RequestError for other types, unknown keys
        and kinds, and empty texts. Changes nothing.
        """
        if isinstance(prompt, Mapping):
            parts = self._dict(one_sequence(prompt) if is_encoding(prompt) else prompt)
        elif isinstance(prompt, PromptParts):
            parts = prompt
        else:
            parts = PromptParts(**_content(prompt))
        if parts.messages is None:
            return parts
        return replace(parts, messages=self.parts.messages(parts.messages, where, deadline))

    def _dict(self, prompt: Mapping[str, Any]) -> PromptParts:
        """Reads all of a prompt's dict but the messages in it."""
        for name in prompt:
            if name not in PROMPT_KEYS:
                raise RequestError(
                    f"the prompt dict has an unknown key {name!r}; "
                    f"{hint_of_key(str(name), self.kinds)}"
                )
        content = [name for name in CONTENT_KEYS if prompt.get(name) is not None]
        if len(content) > 1:
            raise wrong_content(" and ".join(content))
        media = [name for name in MEDIA_KEYS if prompt.get(name) is not None]
        if len(media) > 1:
            raise RequestError("a prompt dict takes multimodal_data or multi_modal_data, not both")
        items = tuple(media_items(prompt[media[0]], self.kinds)) if media else ()
        value = prompt[content[0]] if content else ""
        is_alone = isinstance(value, str) and not value and bool(items)
        read: dict[str, Any] = {}
        if content == ["messages"]:
            read = {"messages": value}
        elif content == ["prompt_token_ids"]:
            read = {"ids": _token_ids(value)}
        elif content:
            read = {"text": ""} if is_alone else _content(value)  # enough for some encoders
        return PromptParts(
            **read,
            media=items,
            template=prompt.get("chat_template"),
            template_kwargs=prompt.get("chat_template_kwargs"),
            processor_kwargs=prompt.get("mm_processor_kwargs"),
            tools=prompt.get("tools"),
            adapter=prompt.get("adapter"),
            priority=prompt.get("priority"),
            timeout=prompt.get("timeout"),
        )


def wrong_content(found: str) -> RequestError:
    """Returns the error of a prompt with none of CONTENT_KEYS, or with several."""
    return RequestError(
        f"a prompt dict needs exactly one of {', '.join(CONTENT_KEYS)}; found {found}"
    )


def with_changed_media(parts: PromptParts, change: Callable[[MediaItem], Any]) -> PromptParts:
    """Returns a prompt with what `change` makes of each of its media, in order; the options beside
    an item stay."""
    media = tuple(changed(item, change) for item in parts.media)
    if parts.messages is None:
        return replace(parts, media=media) if media else parts
    messages = tuple(_changed_message(message, change) for message in parts.messages)
    return replace(parts, media=media, messages=messages)


def _changed_message(message: ChatMessage, change: Callable[[MediaItem], Any]) -> ChatMessage:
    if not isinstance(message.content, tuple):
        return message
    content = tuple(_changed_part(part, change) for part in message.content)
    return ChatMessage(fields=message.fields, content=content)


def _changed_part(part: Part, change: Callable[[MediaItem], Any]) -> Part:
    if isinstance(part, MediaPart) and part.item.source is not None:
        return MediaPart(item=changed(part.item, change, is_in_part=True), path=part.path)
    if isinstance(part, OpenPart) and part.files:
        files = {key: replace(item, source=change(item)) for key, item in part.files.items()}
        sources = {key: item.source for key, item in files.items()}
        return replace(part, part={**part.part, **sources}, files=files)
    return part


def hint_of_key(name: str, kinds: Sequence[str], known: Sequence[str] = PROMPT_KEYS) -> str:
    """Returns what to write instead of a key that does not exist. known: those that do."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if name.removesuffix("s") in kinds or name in ("mm_data", "multimodal", "multi_modal"):
        return "did you mean 'multimodal_data', a dict such as {'image': [...]}?"
    near = meant(name, known)
    return f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"


def _own(prompt: Any, name: str) -> Any:
    """Returns what a prompt itself says about its request; None where it says nothing."""
    if isinstance(prompt, PromptParts):
        return getattr(prompt, name)
    return prompt.get(name) if isinstance(prompt, Mapping) else None


def priority_of(prompt: Any, default: int = 0) -> int:
    """Returns the prompt's own "priority", else the default. Raises RequestError unless it is a
    whole number of 64 bits."""
    own = _own(prompt, "priority")
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
    own = _own(prompt, "adapter")
    name = default if own is None else own
    if not isinstance(name, str):
        raise RequestError(f"adapter must be the name of an adapter, got {shown(name)}")
    return name


def deadline_of(prompt: Any, timeout: Any = None) -> Deadline | None:
    """Returns the earlier deadline of `timeout` and of the prompt's own "timeout", from now on;
    None when there is none. Raises RequestError for a wrong one."""
    own = _own(prompt, "timeout")
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
    """Returns a list, array or tensor of integers as a tuple of ints; a batch of one sequence, of
    shape [1, n], is that sequence."""
    values = listed(value)
    if isinstance(values, (list, tuple)) and len(values) == 1:
        only = listed(values[0])
        values = only if isinstance(only, (list, tuple)) else values
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise RequestError(
            f"a prompt must be a text, a list of token ids or a dict, got {type(value).__name__}"
        )
    if not values:
        raise RequestError("the prompt is empty; give at least one token id")
    try:
        return tuple(_token_id(item) for item in values)
    except TypeError:
        wrong = next((item for item in values if not _is_integer(item)), values[0])
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
