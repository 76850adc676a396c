"""The table of near-duplicates, in CSV or as a list of ids; `--only @FILE` reads both."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mmdeploy_llm.data.outputs.opening.merged import RECORDS_AT_ONCE
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

from .groups import Groups
from .opened import Vectors

COLUMNS = ("id", "keep", "group", "similarity", "nearest", "path")
SUFFIXES = (".csv", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One item. group: the number of its group, from 1; None: nothing is like it. nearest: the id
    of the item that is most like it."""

    id: str
    keep: bool
    group: int | None
    similarity: float
    nearest: str | None
    path: str | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as texts."""
        has_group = self.group is not None
        return (
            self.id,
            "yes" if self.keep else "no",
            str(self.group) if has_group else "",
            f"{self.similarity:.4f}" if has_group else "",
            self.nearest or "",
            self.path or "",
        )


def rows_of(vectors: Vectors, groups: Groups) -> Iterator[TableRow]:
    """Yields the items in the order of the files. An item without a vector is kept: it is like
    nothing that is known. Of an item that is there several times the last one has a row."""
    numbers: dict[int, int] = {}
    everyone = (own for own in range(vectors.num_items) if not vectors.is_replaced[own])
    while some := list(itertools.islice(everyone, RECORDS_AT_ONCE)):
        near = [int(groups.near[own]) for own in some]
        found = _records(vectors, [*some, *(own for own in near if own >= 0)])
        for own, other in zip(some, near, strict=True):
            first, record = int(groups.first[own]), found[own]
            is_in_group = other >= 0
            yield TableRow(
                id=record.key,
                keep=first == own,
                group=numbers.setdefault(first, len(numbers) + 1) if is_in_group else None,
                similarity=float(groups.similarity[own]),
                nearest=found[other].key if is_in_group else None,
                path=record.path,
            )


def _records(vectors: Vectors, numbers: Iterable[int]) -> dict[int, Record]:
    wanted = sorted(set(numbers))
    return dict(zip(wanted, vectors.records(wanted), strict=True))


def check_target(path: Path, *, is_replaced: bool) -> None:
    """Raises ConfigError for a table that cannot be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"the table {str(path)!r} must end in .csv (all items, with their groups) or .txt (the "
            "ids of the items to keep)"
        )
    if path.exists() and not is_replaced:
        raise ConfigError(f"{str(path)!r} exists already; --overwrite replaces it")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {str(path.parent)!r} does not exist")


def write_table(path: Path, rows: Iterable[TableRow], *, is_replaced: bool) -> None:
    """Writes the table: all of it, or nothing where that fails. Raises as `check_target` does."""
    is_list = path.suffix.lower() == ".txt"
    with claimed(path), Folder.open(path.parent) as folder:
        check_target(path, is_replaced=is_replaced)  # what another run has written since
        folder.write(path.name, _ids(rows) if is_list else _lines(rows))


def _ids(rows: Iterable[TableRow]) -> Iterator[bytes]:
    for row in rows:
        if not row.keep:
            continue
        if row.id.splitlines() != [row.id]:  # as --only reads them
            words = f"the id {row.id!r:.80} is empty or has a line break"
            raise ConfigError(f"{words}; write the table as .csv")
        yield f"{row.id}\n".encode(errors="surrogatepass")


def _lines(rows: Iterable[TableRow]) -> Iterator[bytes]:
    for cells in itertools.chain([COLUMNS], (row.cells for row in rows)):
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(cells)
        yield line.getvalue().encode(errors="surrogatepass")
