"""Splits items of kinds that yield others, such as a PDF into its pages, without making a part."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmdeploy_llm.errors import MediaError, MediaLimitError, RequestError
from mmdeploy_llm.hooks import MediaLimits, MediaRef, MediaSplitter, SplitPart
from mmdeploy_llm.hooks.names import shown_uri, with_file
from mmdeploy_llm.hooks.splitting import CanLabel
from mmdeploy_llm.messages import MediaItem

from .forms import normalised
from .keys import key_of
from .kinds import ModelMedia

# Calls a method of a splitter within its time, and names the splitter in what it raises.
Call = Callable[[MediaSplitter, Callable[[], Any], MediaLimits], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Document:
    """An item that was split. name: for messages. parts: what its splitter returned. key: of its
    content and options; "" where the content has no digest. labels: of the parts that were made,
    which Part.made adds."""

    splitter: MediaSplitter
    name: str
    parts: Sequence[SplitPart]
    key: str
    labels: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The source of an item that is a part of a document, not made yet."""

    document: Document
    index: int

    @property
    def name(self) -> str:
        """Names the part, such as "page 3 of report.pdf"."""
        return f"{self._label()} of {self.document.name}"

    def _label(self) -> str:
        parts = self.document.parts
        label: object = self.document.labels.get(self.index)
        if label is None and isinstance(parts, CanLabel):
            try:
                label = parts.label(self.index)
            except Exception:  # of a plugin, while an error is told
                label = None
        own = f"{self.document.splitter.part_name} {self.index + 1}"
        return label if isinstance(label, str) and label else own

    def key(self, item: MediaItem) -> str:
        """Returns a key for the item made of this part; "" where the document has none."""
        own = f"{self.document.key} {self.index}"
        return key_of(item, "part", own.encode()) if self.document.key else ""

    def made(self, item: MediaItem, call: Call, limits: MediaLimits) -> MediaItem:
        """Makes the part: returns its item."""
        splitter, parts = self.document.splitter, self.document.parts
        found = call(splitter, lambda: parts[self.index], limits)
        if not isinstance(found, SplitPart) or not isinstance(found.options, Mapping):
            raise MediaError(
                f"media splitter {type(splitter).__name__} (plugin {type(splitter).__module__}) "
                f"must make SplitParts, got {type(found).__name__}"
            )
        if found.label and isinstance(found.label, str):
            self.document.labels[self.index] = found.label
        options = {**found.options, **item.options}
        return normalised(MediaItem(kind=item.kind, source=found.source, options=options), "split")


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """Splits the items of prompts.

    open: returns an item's bytes, path or loaded object. call: see Call.
    """

    media: ModelMedia
    max_items: Mapping[str, int]
    open: Callable[[MediaItem, MediaLimits], Any]
    call: Call

    def split(
        self, items: Sequence[MediaItem], limits: Callable[[MediaItem], MediaLimits]
    ) -> list[tuple[MediaItem, ...]]:
        """Returns for each item its parts, or itself where its kind yields no other.

        limits: of an item. Raises MediaLimitError, with what would help, before any part is made,
        and MediaError.
        """
        counts = Counter(item.kind for item in items)
        return [self._split_named(item, counts, limits) for item in items]

    def _split_named(
        self,
        item: MediaItem,
        counts: Counter[str],
        limits: Callable[[MediaItem], MediaLimits],
    ) -> tuple[MediaItem, ...]:
        """Splits an item; errors name its file."""
        try:
            return self._split(item, counts, limits)
        except RequestError as error:
            source = item.source
            if not isinstance(source, MediaRef) or name_of(item) in str(error):
                raise
            raise with_file(error, source) from error.__cause__

    def _split(
        self,
        item: MediaItem,
        counts: Counter[str],
        limits: Callable[[MediaItem], MediaLimits],
    ) -> tuple[MediaItem, ...]:
        splitter = self.media.splitters.get(item.kind)
        if splitter is None:
            return (item,)
        kind, own, outer = self.media.yields[item.kind], limits(item), item
        if isinstance(item.source, Part):
            item = item.source.made(item, self.call, own)
        name = name_of(outer)
        options, rest = divided(item.options, kind)
        source = self.open(item, own)
        parts, count = self.call(splitter, lambda: _parts(splitter, source, options, own), own)
        if not count:
            raise MediaError(f"{name} has no {splitter.part_name}s, so there is no {kind} in it")
        self._check(splitter, name, kind, count, counts[kind])
        counts[kind] += count
        key = ""
        if isinstance(source, bytes):
            key = key_of(MediaItem(kind=item.kind, source=None, options=options), "split", source)
        document = Document(splitter=splitter, name=name, parts=parts, key=key)
        found: list[MediaItem] = []
        for index in range(count):
            part = Part(document=document, index=index)
            # A part may be a document itself, such as a PDF of a folder.
            own_part = MediaItem(kind=kind, source=part, options=rest)
            found += self._split(own_part, counts, limits)
        return tuple(found)

    def _check(
        self, splitter: MediaSplitter, name: str, kind: str, count: int, others: int
    ) -> None:
        """Raises MediaLimitError for more parts than there may be items of their kind."""
        allowed = self.max_items.get(kind, 1)
        if count + others <= allowed:
            return
        beside = f" beside {others} given otherwise" if others else ""
        left = allowed - others
        choice = ""
        if splitter.range_option is not None and left > 0:
            choice = f" or give {splitter.range_option}='1{f'-{left}' if left > 1 else ''}'"
        raise MediaLimitError(
            f"{name} has {count} {splitter.part_name}{'s' * (count != 1)}, {kind} allows "
            f"{allowed}{beside}: raise limit_mm_per_prompt={{{kind!r}: {count + others}}}{choice}"
        )


def divided(options: Mapping[str, Any], kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of a splitter and those of its parts, which begin with their kind."""
    own = {name: value for name, value in options.items() if not name.startswith(f"{kind}_")}
    rest = {name: value for name, value in options.items() if name not in own}
    if kind == "image":
        return own, rest
    return own, {name.removeprefix(f"{kind}_"): value for name, value in rest.items()}


def name_of(item: MediaItem) -> str:
    """Returns the name of a document for messages: that of its file, or its kind."""
    source = item.source
    if isinstance(source, Part):
        return source.name
    if not isinstance(source, MediaRef):
        return f"the {item.kind}"
    if source.scheme in ("", "file"):
        return os.path.basename(source.uri.rstrip("/"))[-200:] or f"the {item.kind}"
    return f"the {item.kind} {shown_uri(source)}"


def _parts(
    splitter: MediaSplitter, source: Any, options: Mapping[str, Any], limits: MediaLimits
) -> tuple[Sequence[SplitPart], int]:
    """Splits an item and counts its parts; called within the time of the splitter."""
    parts = splitter.split(source, options, limits)
    if not (hasattr(parts, "__len__") and hasattr(parts, "__getitem__")) or isinstance(parts, str):
        raise MediaError(
            f"media splitter {type(splitter).__name__} (plugin {type(splitter).__module__}) must "
            f"return a sequence of parts, got {type(parts).__name__}"
        )
    return parts, len(parts)
