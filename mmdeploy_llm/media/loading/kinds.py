"""ModelMedia: the media that one model takes, and what reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mmdeploy_llm.hooks import EncoderPrompts, MediaProcessor, MediaSplitter
from mmdeploy_llm.messages import MEDIA_KINDS

logger = logging.getLogger(__name__)

TEXTS = (
    "{%- for m in messages -%}{%- if m.content is string -%}{{- m.content -}}{%- else -%}"
    "{%- for p in m.content -%}{%- if p.type == 'text' -%}{{- p.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMedia:
    """The media that one model takes, by kind.

    processors: of the kinds that have tokens of their own. splitters: of the kinds whose items are
        split; yields: the kind of their parts, also of kinds that the model does not take.
    known: further kinds that plugins know, and this model does not take.
    part_types: type of a message's part -> kind, beside "<kind>" and "<kind>_url".
    part_texts: what stands for an item where a chat template renders none, unless it is the
        first marker of the kind's processor.
    encoded: the kinds that the model encodes; items of others bring their embeddings. None: all.
    encoder: how a model with an encoder divides prompts; its media have no placeholders. None: for
        all other models.
    owners: names processors and splitters in messages; those that are not named are by their class.
    """

    processors: Mapping[str, MediaProcessor] = field(default_factory=dict)
    splitters: Mapping[str, MediaSplitter] = field(default_factory=dict)
    yields: Mapping[str, str] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    part_types: Mapping[str, str] = field(default_factory=dict)
    part_texts: Mapping[str, str] = field(default_factory=dict)
    encoded: tuple[str, ...] | None = None
    owners: Mapping[str, str] = field(default_factory=dict)
    encoder: EncoderPrompts | None = None

    @property
    def template(self) -> str | None:
        """The chat template where a checkpoint has none: the texts of a conversation, of a model
        with an encoder, which knows no roles."""
        return None if self.has_places else TEXTS

    @property
    def has_places(self) -> bool:
        """Whether prompts say where media stand."""
        return self.encoder is None or self.encoder.has_places

    @property
    def inside(self) -> ModelMedia:
        """The media that have placeholders in prompts: of most models with an encoder none."""
        return self if self.has_places else replace(self, processors={}, splitters={})

    @property
    def outside_texts(self) -> tuple[str, ...]:
        """The texts that stand for media without placeholders, which the encoder's rule finds."""
        processors = () if self.has_places else tuple(self.processors.values())
        return tuple(text for each in processors for text in (each.token, *each.markers))

    @property
    def read(self) -> tuple[str, ...]:
        """The kinds that the model takes."""
        return (*self.processors, *self.splitters)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that prompts may name; those that the model does not take have an error of
        their own."""
        return tuple(dict.fromkeys((*MEDIA_KINDS, *self.read, *self.known)))

    def kind_of_part(self, part_type: object) -> str | None:
        """Returns the kind of a message's part of this type, None for an unknown type."""
        if not isinstance(part_type, str):
            return None
        own = part_type.removesuffix("_url")
        return own if own in self.kinds else self.part_types.get(part_type)

    @property
    def types(self) -> tuple[str, ...]:
        """The types of parts with media."""
        kinds = self.kinds
        return (*(f"{kind}_url" for kind in kinds), *kinds, *self.part_types)

    def part_text(self, kind: str) -> str:
        """Returns the text that stands for an item of a kind with a processor."""
        processor = self.processors[kind]
        return self.part_texts.get(kind) or next(iter(processor.markers), processor.token)

    def owner(self, kind: str) -> str:
        """Names what reads a kind, and its plugin."""
        if kind in self.owners:
            return self.owners[kind]
        return owner(self.processors.get(kind) or self.splitters[kind])

    def close(self) -> None:
        """Closes the processors and splitters. An error in one, which is a plugin's, is logged and
        prevents no other."""
        readers: Iterable[MediaProcessor | MediaSplitter]
        readers = (*self.processors.values(), *self.splitters.values())
        for reader in readers:
            try:
                reader.close()
            except Exception:
                logger.exception("%s cannot be closed", owner(reader))


def owner(reader: object) -> str:
    """Names a processor or splitter by its class, and its plugin by its module."""
    noun = "splitter" if isinstance(reader, MediaSplitter) else "processor"
    return f"media {noun} {type(reader).__name__} (plugin {type(reader).__module__})"
