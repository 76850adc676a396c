"""Puts the parts of documents into prompts: the marker of a PDF becomes what its pages are written
as, and media are brought into the order of their placeholders."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaItem
from mmdeploy_llm.values.prompt import PromptParts

from .tokenizer import PromptTokenizer

# Returns what a prompt has for that many items of a kind.
Write = Callable[[str, int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """An item of a prompt and what it becomes: its parts, or itself."""

    item: MediaItem
    parts: tuple[MediaItem, ...]


class Documents:
    """The markers of the kinds that are split."""

    def __init__(self, media: ModelMedia, tokenizer: PromptTokenizer) -> None:
        self._splitters = media.splitters
        self._kinds = {
            marker: kind for kind, own in media.splitters.items() for marker in own.markers
        }
        texts = sorted(self._kinds, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        ids = {marker: tokenizer.token_ids(marker) for marker in self._kinds}
        self._ids = {own: self._kinds[marker] for marker, own in ids.items() if own}
        self._tokenizer = tokenizer

    @property
    def markers(self) -> tuple[str, ...]:
        """Every text that represents a document."""
        return tuple(self._kinds)

    def concern(self, parts: PromptParts) -> bool:
        """Whether a text or ids have documents or, by mistake, markers of them."""
        return bool(self._splitters) and self._has(parts)

    def _has(self, parts: PromptParts) -> bool:
        if any(item.kind in self._splitters for item in parts.media):
            return True
        if parts.ids is not None:
            return any(kind for kind, _ in self._pieces(parts.ids))
        return self._pattern is not None and self._pattern.search(parts.text or "") is not None

    def in_text(
        self,
        text: str,
        groups: Sequence[Group],
        write: Write,
        count: Callable[[str], Counter[str]],
    ) -> tuple[str, tuple[MediaItem, ...]]:
        """Returns the text with the i-th marker of a kind replaced by the parts of its i-th item,
        and all items in the order of their placeholders.

        count: counts the placeholders in a text by kind. Raises MediaError for a wrong number of
        markers of a kind; none stands for parts that have placeholders of their own.
        """
        pieces = self._pattern.split(text) if self._pattern is not None else [text]
        found = [self._kinds[marker] for marker in pieces[1::2]]
        order = _Order(groups, found)
        written = []
        for index, piece in enumerate(pieces):
            if index % 2:
                kind, number = order.document(found[index // 2])
                written.append(write(kind, number))
            else:
                order.take(count(piece))
                written.append(piece)
        return "".join(written), order.all()

    def in_ids(
        self,
        ids: Sequence[int],
        groups: Sequence[Group],
        write: Write,
        count: Callable[[Sequence[int]], Counter[str]],
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Does for token ids what `in_text` does for a text, with markers made of added tokens."""
        pieces = list(self._pieces(ids))
        order = _Order(groups, [kind for kind, _ in pieces if kind])
        written: list[int] = []
        for kind, piece in pieces:
            if kind:
                written += self._tokenizer.encode(write(*order.document(kind)))
            else:
                order.take(count(piece))
                written += piece
        return written, order.all()

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields a kind for each marker, and "" with the ids between markers."""
        lengths = sorted({len(marker) for marker in self._ids}, reverse=True)
        begin = start = 0
        while lengths and start < len(ids):
            found = (tuple(ids[start : start + length]) for length in lengths)
            marker = next((piece for piece in found if piece in self._ids), None)
            if marker is None:
                start += 1
                continue
            yield "", ids[begin:start]
            yield self._ids[marker], ()
            begin = start = start + len(marker)
        yield "", ids[begin:]

    def hint(self, groups: Sequence[Group]) -> str:
        """Returns what would help where the parts of documents have no placeholders."""
        for group in groups:
            splitter = self._splitters.get(group.item.kind)
            if splitter is not None and splitter.markers:
                return (
                    f"; {splitter.markers[0]!r} stands for all {splitter.part_name}s of a "
                    f"{group.item.kind}"
                )
        return ""


class _Order:
    """Brings items into the order of their placeholders. Only its methods change it."""

    def __init__(self, groups: Sequence[Group], found: Sequence[str]) -> None:
        counts, given = Counter(found), Counter(group.item.kind for group in groups)
        for kind, number in counts.items():
            if number != given[kind]:
                raise MediaError(
                    f"the prompt has {number} marker{'s' * (number != 1)} for {kind}s, given are "
                    f"{given[kind]}; give one marker for each"
                )
        self._documents: dict[str, list[Group]] = {kind: [] for kind in counts}
        self._items: dict[str, list[MediaItem]] = {}
        for group in groups:
            if group.item.kind in counts:
                self._documents[group.item.kind].append(group)
            else:
                for part in group.parts:
                    self._items.setdefault(part.kind, []).append(part)
        self._ordered: list[MediaItem] = []

    def document(self, kind: str) -> tuple[str, int]:
        """Takes the next document of a kind; returns the kind of its parts and their number."""
        parts = self._documents[kind].pop(0).parts
        self._ordered += parts
        return parts[0].kind, len(parts)

    def take(self, counts: Mapping[str, int]) -> None:
        """Takes the next items of placeholders, as many of a kind as there are."""
        for kind, number in counts.items():
            queue = self._items.get(kind, [])
            self._ordered += queue[:number]
            del queue[:number]

    def all(self) -> tuple[MediaItem, ...]:
        """Returns all items; those without a placeholder are the last ones."""
        return (*self._ordered, *(item for queue in self._items.values() for item in queue))
