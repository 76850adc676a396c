"""PromptParts: a prompt as the one reader has read it (engine/intake/prompts.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mmdeploy_llm.messages import MediaItem


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A text among the parts of a message."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """A media item among the parts of a message.

    item: its source is None where `multimodal_data` has it.
    path: names the part in messages of errors, such as "messages[2].content[1]".
    """

    item: MediaItem
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """A part that only a reader understands which knows the model and its plugins.

    part: as it was given. path: as of MediaPart. files: those that it names, by their keys.
    """

    part: Any
    path: str
    files: Mapping[str, MediaItem]


Part = TextPart | MediaPart | OpenPart


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a chat that was read and checked.

    fields: all but the content, such as its role and tool calls, copied.
    content: None only beside tool calls.
    """

    fields: Mapping[str, Any]
    content: str | tuple[Part, ...] | None

    @property
    def role(self) -> str:
        """Who speaks."""
        return str(self.fields["role"])

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the content; a text alone is one, and an empty one none."""
        if isinstance(self.content, str):
            return (TextPart(text=self.content),) if self.content else ()
        return self.content or ()

    @property
    def text(self) -> str:
        """Its texts, with spaces between them."""
        return " ".join(part.text for part in self.parts if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    """A prompt that was read. At most one of text, ids and messages is given.

    media: the items of `multimodal_data`, unopened.
    processor_kwargs: options for all media of the prompt.
    tools, adapter, priority, timeout: as the caller passed them.
    hint: what would help where media have no placeholders.
    pair: the second text of a pair, which the tokenizer joins with the first.
    """

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: tuple[ChatMessage, ...] | None = None
    media: tuple[MediaItem, ...] = ()
    template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    processor_kwargs: Any = None
    tools: Any = None
    adapter: Any = None
    priority: Any = None
    timeout: Any = None
    hint: str = ""
    pair: str | None = None

    @property
    def items(self) -> Iterator[MediaItem]:
        """Its media, those in messages too, in order; unopened."""
        yield from self.media
        for message in self.messages or ():
            for part in message.parts:
                if isinstance(part, OpenPart):
                    yield from part.files.values()
                elif isinstance(part, MediaPart) and part.item.source is not None:
                    yield part.item
