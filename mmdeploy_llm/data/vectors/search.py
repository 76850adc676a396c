"""Searches files of vectors, and finds near-duplicates in them: what scripts and commands call."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.text.progress_bars import UseTqdm, open_bar

from . import TOP_K
from .groups import Groups, grouped
from .nearest import nearest
from .opened import Vectors
from .table import TableRow, check_target, rows_of, write_table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

THRESHOLD = 0.95

Names = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An item that a search has found. score: larger is nearer. record: of the item: its id, path,
    media and columns, without its vector in a table of others."""

    score: float
    record: Record

    @property
    def id(self) -> str:
        """The id of the item."""
        return self.record.key

    @property
    def path(self) -> str | None:
        """Its file, if it is one."""
        return self.record.path

    def to_dict(self) -> dict[str, Any]:
        """Returns what JSON has of it."""
        record = self.record
        found = {"id": self.id, "score": self.score, "path": record.path, "prompt": record.prompt}
        found["media"] = [own.name for own in record.media]
        found["columns"] = dict(record.columns)
        return {name: value for name, value in found.items() if value not in (None, [], {})}


def open_vectors(
    names: Names, column: str | None = None, kinds: KindTable | None = None
) -> Vectors:
    """Opens files of vectors: outputs of `embed`, other tables and arrays. kinds: see Vectors.
    Raises ConfigError."""
    several = [names] if isinstance(names, (str, os.PathLike)) else names
    return Vectors([os.fspath(name) for name in several], column, kinds)


def search(
    vectors: Vectors,
    queries: Sequence[NDArray[np.float32]],
    top_k: int = TOP_K,
    *,
    similarity: str = "cosine",
    excluded: Sequence[int | None] = (),
) -> list[list[Found]]:
    """Returns the `top_k` nearest items of each query, the best first, exactly. Raises ConfigError
    for files without a vector, and as `nearest` does."""
    blocks = checked(vectors)
    hits = nearest(blocks, queries, top_k, similarity=similarity, excluded=excluded)
    numbers = sorted({hit.number for own in hits for hit in own})
    records = dict(zip(numbers, vectors.records(numbers), strict=True))
    return [[Found(score=hit.score, record=records[hit.number]) for hit in own] for own in hits]


def checked(vectors: Vectors) -> Iterator[Any]:
    """Yields the blocks of a file. Raises ConfigError where it has none."""
    is_any = False
    for block in vectors.blocks():
        is_any = True
        yield block
    if not is_any:
        raise ConfigError(
            f"{vectors.name!r} has {vectors.num_items} items and no vector: `mmdeploy-llm embed` "
            "writes outputs with vectors"
        )


def number_of(vectors: Vectors, item_id: str) -> int:
    """Returns the number of an item. Raises ConfigError for an unknown id."""
    found = None
    for number, key in enumerate(vectors.keys()):
        if item_id == (str(number + 1) if key is None else key):
            found = number
    if found is None:
        raise ConfigError(f"{vectors.name!r} has no item with the id {item_id[:80]!r}")
    return found


def like(
    vectors: Vectors, item_id: str, top_k: int = TOP_K, *, similarity: str = "cosine"
) -> list[Found]:
    """Returns the items that are nearest to one of the file, without itself. Raises ConfigError for
    an unknown id and an item without a vector."""
    number = number_of(vectors, item_id)
    query = vectors_at(vectors, [number]).get(number)
    if query is None:
        raise ConfigError(f"the item {item_id[:80]!r} has no vector: it failed, or is not finite")
    (found,) = search(vectors, [query], top_k, similarity=similarity, excluded=[number])
    return found


def vectors_at(vectors: Vectors, numbers: Sequence[int]) -> dict[int, NDArray[np.float32]]:
    """Returns the vectors of those of these items that have one."""
    import numpy as np

    found: dict[int, NDArray[np.float32]] = {}
    for block in checked(vectors):
        starts = block.starts
        for at in np.flatnonzero(np.isin(block.numbers, numbers)).tolist():
            count = 1 if block.lengths is None else block.lengths[at]
            rows = block.rows[starts[at] : starts[at] + count]
            found[int(block.numbers[at])] = (rows[0] if block.lengths is None else rows).copy()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """Near-duplicates. groups: by the numbers of the items, see Groups."""

    vectors: Vectors
    groups: Groups

    def rows(self) -> Iterator[TableRow]:
        """Yields all items in their order, each with its group."""
        return rows_of(self.vectors, self.groups)

    @property
    def kept(self) -> list[str]:
        """The ids of the items without the duplicates, for `run_batch(..., only=kept)`."""
        return [row.id for row in self.rows() if row.keep]

    def counts(self) -> dict[str, int]:
        """Returns the numbers of items, groups, and of items that are kept and not kept."""
        num_items = int((~self.vectors.is_replaced).sum())
        num_out = self.groups.num_duplicates
        return {
            "num_items": num_items,
            "num_without_vector": num_items - int(self.groups.is_there.sum()),
            "num_groups": self.groups.num_groups,
            "num_duplicates": num_out,
            "num_kept": num_items - num_out,
        }

    def words(self) -> str:
        """Returns the counts in words."""
        own = self.counts()
        without = own["num_without_vector"]
        more = f", {without:,} of them without a vector" if without else ""
        return (
            f"{own['num_items']:,} items{more}: {own['num_groups']:,} groups with "
            f"{own['num_duplicates']:,} near-duplicates; {own['num_kept']:,} are kept"
        )

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        """Writes the table: NAME.csv, or NAME.txt with the ids of the items to keep."""
        check_target(Path(path), is_replaced=overwrite)
        write_table(Path(path), self.rows(), is_replaced=overwrite)


def dedupe(
    vectors: Vectors, threshold: float = THRESHOLD, *, use_tqdm: UseTqdm | None = None
) -> Duplicates:
    """Groups the items that a chain of pairs with a cosine of at least `threshold` connects; the
    first one of each group is kept. Raises ConfigError as `grouped` does."""
    with open_bar(use_tqdm, total=vectors.num_items, desc="Compared") as bar:
        groups = grouped(
            lambda: checked(vectors), vectors.num_items, threshold, progress=bar.update
        )
    return Duplicates(vectors=vectors, groups=groups)
