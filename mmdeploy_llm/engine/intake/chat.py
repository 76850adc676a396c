"""Reads chat messages: checks them, takes out their media, makes typed placeholders harmless.

messages --> parts of plugins' types expanded --> checked copies, media gathered
         --> marker texts in user text broken by a mark --> template --> prompt with marks; the
             tokenizer sees the text between them in pieces
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.loading.expanding import PartExpander, Placed
from mmdeploy_llm.media.loading.forms import item_of_part, normalised, placed_parts
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.deadline import Deadline

from .tools import template_calls

MARKS = range(0xE000, 0xF900)  # private-use characters, without a meaning in any text
MAX_SHOWN = 60  # characters of a wrong value in a message
PART_FORMS = '{"type": "text", "text": ...} or {"type": "image", "image": ...}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages ready for a template.

    media: in the order of their parts; source is None for a part without media of its own.
    locations: the part of each item, for messages of errors.
    mark: character inserted into every marker text that a user typed, "" if there was none.
    """

    messages: tuple[Mapping[str, Any], ...]
    media: tuple[MediaItem, ...]
    locations: tuple[str, ...]
    mark: str
    tools: tuple[Mapping[str, Any], ...] = ()


def read_messages(
    messages: Any,
    *,
    markers: Sequence[str],
    template: str,
    kinds: ModelMedia,
    tools: Sequence[Mapping[str, Any]] = (),
    where: str = "",
    expander: PartExpander | None = None,
    deadline: Deadline | None = None,
) -> Conversation:
    """Returns checked copies of the messages with their media taken out, each of which leaves a
    part {"type": kind}; the originals are unchanged.

    markers: texts that represent media in a prompt.
    template: whose characters are no mark.
    kinds: the kinds of media that parts may have.
    tools: the result of `read_tools`; their texts are made harmless too.
    where: names the conversation, before the number of a message.
    expander: writes parts whose types plugins add. deadline: of the request.

    Raises RequestError that says which message and part is wrong.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"{where}messages must be a list of message dicts, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError(f"{where}messages must not be empty")
    messages = [
        _expanded(message, where, i, expander, deadline) for i, message in enumerate(messages)
    ]
    reader = _Reader(markers, lambda: _free_mark([*messages, *tools], template), kinds, expander)
    copies = tuple(
        reader.message(message, f"{where}message {index}") for index, message in enumerate(messages)
    )
    copied_tools = tuple(reader.copy(tool) for tool in tools)
    return Conversation(
        messages=copies,
        media=tuple(reader.media),
        locations=tuple(reader.locations),
        mark=reader.mark,
        tools=copied_tools,
    )


def with_sources(conversation: Conversation, given: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """Returns the media of message parts; a part without its own takes the next given item of its
    kind.

    Raises RequestError when items remain on either side.
    """
    left = list(given)
    items = []
    for part, location in zip(conversation.media, conversation.locations, strict=True):
        if part.source is None:
            found = next((item for item in left if item.kind == part.kind), None)
            if found is None:
                raise RequestError(
                    f"{location}: a part of type {part.kind!r} has no {part.kind}; give it under "
                    f"'{part.kind}' or '{part.kind}_url'"
                )
            left = [item for item in left if item is not found]
            part = replace(found, options={**found.options, **part.options})
        items.append(normalised(part, "chat"))
    if left:
        raise RequestError(
            f"multimodal_data has {len(left)} more items than the messages have parts; remove them "
            "or add parts"
        )
    return tuple(items)


def _expanded(
    message: Any,
    where: str,
    index: int,
    expander: PartExpander | None,
    deadline: Deadline | None,
) -> Any:
    """Returns the message with its tool calls in the form that templates read, and its parts
    placed, those of plugins' types expanded."""
    if not isinstance(message, Mapping):
        return message
    made, content = dict(message), message.get("content")
    if message.get("tool_calls"):
        made["tool_calls"] = template_calls(message["tool_calls"], f"{where}message {index}")
    if isinstance(content, (list, tuple)):
        path = f"{where}messages[{index}].content"
        made["content"] = placed_parts(content, path, expander, deadline)
    return made


class _Reader:
    """Copies the messages of one conversation and collects their media. Only its methods write
    `media`, `locations` and `mark`, which is "" until a text needs one. free_mark: finds it."""

    def __init__(
        self,
        markers: Sequence[str],
        free_mark: Callable[[], str],
        kinds: ModelMedia,
        expander: PartExpander | None,
    ) -> None:
        self.mark, self._free_mark = "", free_mark
        self._expander = expander
        self.media: list[MediaItem] = []
        self.locations: list[str] = []
        # The first character of each marker, of those too that stand inside of another one.
        texts = "|".join(map(re.escape, markers))
        self._pattern = re.compile(f"(?=(?:{texts}))(.)", re.DOTALL) if texts else None
        self._kinds = kinds

    def message(self, message: Any, location: str) -> Mapping[str, Any]:
        """Returns a copy of a message for the template. `location` names it in errors."""
        role = _role(message, location)
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            if "content" not in message:
                raise RequestError(f"{location} of role {role!r} has no 'content'")
            content = ""  # None says it, as in what other engines return
        copied = {name: self.copy(value) for name, value in message.items() if name != "content"}
        if content is None or isinstance(content, str):
            return {**copied, "content": self.copy(content)}
        if not isinstance(content, list):
            raise RequestError(
                f"{location}: 'content' must be a text or a list of parts, "
                f"got {type(content).__name__}"
            )
        return {**copied, "content": [self._part(own.part, own.path) for own in content]}

    def _part(self, part: Any, location: str) -> Mapping[str, Any]:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        kind = None if part_type == "text" else self._kinds.kind_of_part(part_type)
        if part_type != "text" and kind is None:
            found = repr(part_type) if isinstance(part, Mapping) else _brief(part)
            others = "" if self._expander is None else self._expander.providers()
            others += "" if isinstance(part, Mapping) else f"; write {PART_FORMS}"
            raise RequestError(
                f"{location}: Unknown content part type: {found}; known: "
                f"{', '.join(('text', *self._kinds.types))}{others}"
            )
        if part_type == "text":
            if not isinstance(part.get("text"), str):
                raise RequestError(
                    f"{location}: a text part needs a 'text', got {_brief(part.get('text'))}"
                )
            return {"type": "text", "text": self.copy(part["text"])}
        assert kind is not None
        assert isinstance(part_type, str)
        self.media.append(item_of_part(part, part_type, kind, location))
        self.locations.append(location)
        return {"type": kind}

    def copy(self, value: Any) -> Any:
        """Copies nested lists and dicts; breaks every marker text in them with the mark."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: self.copy(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.copy(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        if self._pattern is None or not self._pattern.search(text):
            return text
        self.mark = self.mark or self._free_mark()
        return self._pattern.sub(lambda found: found[0] + self.mark, text)


def _role(message: Any, location: str) -> str:
    """Returns the role of a message. Raises RequestError for one without a role."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"{location} must be a dict with 'role' and 'content', got {_brief(message)}"
        )
    role = message.get("role")
    if role is None:
        raise RequestError(
            f"{location} has no 'role'; give 'system', 'user', 'assistant' or 'tool'"
        )
    if not isinstance(role, str):
        raise RequestError(f"{location}: 'role' must be a text, got {_brief(role)}")
    return role


def _free_mark(messages: Sequence[Any], template: str) -> str:
    """Returns a private-use character that occurs neither in the messages nor in the template."""
    texts = [template, *_texts(messages)]
    for code in MARKS:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise RequestError("the messages use every private-use character; remove some")


def _texts(value: Any) -> list[str]:
    if isinstance(value, Placed):
        return _texts(value.part)
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _texts(item)]
    return []


def _brief(value: Any) -> str:
    """Returns a short value as text, else the name of its type."""
    text = repr(value) if isinstance(value, (str, int, float, type(None))) else ""
    return text if text and len(text) < MAX_SHOWN else type(value).__name__
