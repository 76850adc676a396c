"""PageParts: the wanted pages of a document as a lazy sequence, for splitters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

from mmdeploy_llm.hooks import SplitPart


class PageParts(Sequence[SplitPart]):
    """The wanted pages of a document, each made when it is asked for. indexes: of the pages, from
    0."""

    def __init__(self, indexes: Sequence[int]) -> None:
        self.indexes = indexes

    @abstractmethod
    def part(self, place: int) -> SplitPart:
        """Makes one part. place: in `indexes`. Raises MediaError for a page that is damaged."""

    def __len__(self) -> int:
        return len(self.indexes)

    @overload
    def __getitem__(self, place: int) -> SplitPart: ...
    @overload
    def __getitem__(self, place: slice) -> list[SplitPart]: ...
    def __getitem__(self, place: int | slice) -> SplitPart | list[SplitPart]:
        """Returns a page. Raises MediaError as `part`."""
        if isinstance(place, slice):
            return [self[number] for number in range(*place.indices(len(self)))]
        return self.part(place)

    def label(self, place: int) -> str:
        """Returns the name of a page."""
        return f"page {self.indexes[place] + 1}"

    def __iter__(self) -> Iterator[SplitPart]:
        return (self[place] for place in range(len(self)))
