"""Reads chat messages: checks them, takes out their media, makes typed placeholders harmless.

messages --> parts of plugins' types expanded --> checked ChatMessages of typed parts
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
from mmdeploy_llm.media.loading.forms import item_of_part
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.deadline import Deadline
from mmdeploy_llm.values.prompt import ChatMessage, MediaPart, OpenPart, Part, TextPart

from .tools import template_calls

MARKS = range(0xE000, 0xF900)  # private-use characters, without a meaning in any text
MAX_SHOWN = 60  # characters of a wrong value in a message
PART_FORMS = '{"type": "text", "text": ...} or {"type": "image", "image": ...}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages ready for a template.

    mark: character inserted into every marker text that a user typed, "" if there was none.
    """

    messages: tuple[ChatMessage, ...]
    mark: str
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReader:
    """Reads the messages of conversations, part by part.

    kind_of: returns the kind of media in parts of a type, None for another type.
    types: of parts with media, for messages of errors.
    expander: writes parts whose types plugins add.
    is_final: whether it knows the model: it then refuses a part that it does not understand, and
        leaves none open.
    """

    kind_of: Callable[[str], str | None]
    types: Sequence[str]
    expander: PartExpander
    is_final: bool = True

    def messages(
        self, given: Any, where: str = "", deadline: Deadline | None = None
    ) -> tuple[ChatMessage, ...]:
        """Returns messages as typed values; the originals are unchanged. Those that were read
        before may have open parts, which are read now.

        where: names the conversation, before the number of a message. deadline: of the request.
        Raises RequestError that says which message and part is wrong.
        """
        if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
            raise RequestError(
                f"{where}messages must be a list of message dicts, got {type(given).__name__}"
            )
        if not given:
            raise RequestError(f"{where}messages must not be empty")
        return tuple(
            self._finished(message, deadline)
            if isinstance(message, ChatMessage)
            else self._message(message, index, where, deadline)
            for index, message in enumerate(given)
        )

    def _message(
        self, message: Any, index: int, where: str, deadline: Deadline | None
    ) -> ChatMessage:
        location = f"{where}message {index}"
        role = _role(message, location)
        fields = {name: _copy(value) for name, value in message.items() if name != "content"}
        self._check_no_media(fields, f"{location} of role {role!r}")
        content = message.get("content")
        if content is None and isinstance(message.get("refusal"), str):
            content = message["refusal"]  # what an assistant of OpenAI's has said instead
        if message.get("tool_calls"):
            fields["tool_calls"] = _copy(template_calls(message["tool_calls"], location))
        elif content is None:
            if "content" not in message:
                raise RequestError(f"{location} of role {role!r} has no 'content'")
            content = ""  # None says it, as in what other engines return
        if content is None or isinstance(content, str):
            return ChatMessage(fields=fields, content=content)
        if not isinstance(content, (list, tuple)):
            raise RequestError(
                f"{location}: 'content' must be a text or a list of parts, "
                f"got {type(content).__name__}"
            )
        path = f"{where}messages[{index}].content"
        placed = [Placed(part=part, path=f"{path}[{own}]") for own, part in enumerate(content)]
        return ChatMessage(fields=fields, content=self._parts(placed, deadline))

    def _check_no_media(self, fields: Mapping[str, Any], where: str) -> None:
        """Raises RequestError for media where templates do not look: beside the content, as Ollama
        writes them, or in a part of text."""
        for name, value in fields.items():
            kind = self.kind_of(name.removesuffix("s")) if isinstance(name, str) else None
            if kind is not None and value:
                raise RequestError(
                    f"{where}: {name!r} is not read there; give a part of the content for each "
                    f'{kind}, {{"type": "{kind}", "{kind}": ...}}'
                )

    def _finished(self, message: ChatMessage, deadline: Deadline | None) -> ChatMessage:
        if not any(isinstance(part, OpenPart) for part in message.parts):
            return message
        parts: list[Part] = []
        for part in message.parts:
            if isinstance(part, OpenPart):
                parts += self._parts([Placed(part=part.part, path=part.path)], deadline)
            else:
                parts.append(part)
        return replace(message, content=tuple(parts))

    def _parts(self, placed: Sequence[Placed], deadline: Deadline | None) -> tuple[Part, ...]:
        expanded = self.expander.expanded(placed, deadline)
        return tuple(self._part(own.part, own.path) for own in expanded)

    def _part(self, part: Any, path: str) -> Part:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type == "text":
            if not isinstance(part.get("text"), str):
                raise RequestError(
                    f"{path}: a text part needs a 'text', got {_brief(part.get('text'))}"
                )
            self._check_no_media(part, path)
            return TextPart(text=part["text"])
        kind = self.kind_of(part_type) if isinstance(part_type, str) else None
        if kind is not None:
            return MediaPart(item=item_of_part(part, str(part_type), kind, path), path=path)
        if not self.is_final:
            return OpenPart(part=_copy(part), path=path, files=self.expander.files(part))
        found = repr(part_type) if isinstance(part, Mapping) else _brief(part)
        others = self.expander.providers()
        others += "" if isinstance(part, Mapping) else f"; write {PART_FORMS}"
        raise RequestError(
            f"{path}: Unknown content part type: {found}; known: "
            f"{', '.join(('text', *self.types))}{others}"
        )


def with_sources(
    messages: Sequence[ChatMessage], given: Sequence[MediaItem]
) -> tuple[MediaItem, ...]:
    """Returns the media of message parts; a part without its own takes the next given item of its
    kind.

    Raises RequestError when items remain on either side.
    """
    left = list(given)
    items = []
    media = (part for message in messages for part in message.parts if isinstance(part, MediaPart))
    for part in media:
        item = part.item
        if item.source is None:
            found = next((own for own in left if own.kind == item.kind), None)
            if found is None:
                raise RequestError(
                    f"{part.path}: a part of type {item.kind!r} has no {item.kind}; give it under "
                    f"'{item.kind}' or '{item.kind}_url'"
                )
            left = [own for own in left if own is not found]
            item = replace(found, options={**found.options, **item.options})
        items.append(item)
    if left:
        raise RequestError(
            f"multimodal_data has {len(left)} more items than the messages have parts; remove them "
            "or add parts"
        )
    return tuple(items)


def with_harmless_texts(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]],
    markers: Sequence[str],
    template: str,
) -> Conversation:
    """Breaks every marker text in messages and tools with a mark.

    tools: the result of `read_tools`. markers: texts that represent media in a prompt.
    template: whose characters are no mark. Raises RequestError where no character is left for it.
    """
    # The first character of each marker, of those too that stand inside of another one.
    texts = "|".join(map(re.escape, markers))
    pattern = re.compile(f"(?=(?:{texts}))(.)", re.DOTALL) if texts else None
    found = _texts([*messages, *tools])
    if pattern is None or not any(map(pattern.search, found)):
        return Conversation(messages=tuple(messages), mark="", tools=tuple(tools))
    mark = _free_mark([template, *found])

    def broken(text: str) -> str:
        return pattern.sub(lambda found: found[0] + mark, text)

    return Conversation(
        messages=tuple(_changed(message, broken) for message in messages),
        mark=mark,
        tools=tuple(_copy(tool, broken) for tool in tools),
    )


def _copy(value: Any, change: Callable[[str], str] = str) -> Any:
    """Copies nested lists and dicts, with every text in them changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _copy(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item, change) for item in value]
    return value


def _changed(message: ChatMessage, change: Callable[[str], str]) -> ChatMessage:
    """Returns the message with every text in it changed."""
    content = message.content
    if isinstance(content, tuple):
        content = tuple(
            TextPart(text=change(part.text)) if isinstance(part, TextPart) else part
            for part in content
        )
    return ChatMessage(
        fields=_copy(message.fields, change),
        content=change(content) if isinstance(content, str) else content,
    )


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


def _free_mark(texts: Sequence[str]) -> str:
    """Returns a private-use character that occurs in none of the texts."""
    for code in MARKS:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise RequestError("the messages use every private-use character; remove some")


def _texts(value: Any) -> list[str]:
    if isinstance(value, ChatMessage):
        return [*_texts(value.fields), *_texts(value.parts)]
    if isinstance(value, TextPart):
        return [value.text]
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
