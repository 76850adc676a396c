"""Vectors: those of one file or several, outputs of `embed` or others, as one row of items."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mmdeploy_llm.data.files.chosen_kinds import installed_kinds
from mmdeploy_llm.data.outputs.base import Readable
from mmdeploy_llm.data.outputs.formats import PartFormat
from mmdeploy_llm.data.outputs.opening.choose import has_parts, is_remote, known_format
from mmdeploy_llm.data.outputs.opening.merged import OnePart, missing_shards, open_existing
from mmdeploy_llm.data.outputs.part_writer import PartsSink
from mmdeploy_llm.data.outputs.parts import PART_NAME
from mmdeploy_llm.data.records.configuration import ConfigurationFile
from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.ids import IdSet
from mmdeploy_llm.data.records.npy_head import read_npy_head
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.data.rows.names import natural_key
from mmdeploy_llm.errors import ConfigError

from .block import Block
from .parts import ArrayPart, Opened, OutputArrayPart, ParquetPart, Part, RecordsPart, check_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmdeploy_llm.hooks import KindTable

TABLES = (".parquet", ".pq")
MAX_NAMED = 5


class Vectors:
    """The vectors of several files. An item that is there several times, by its id, counts once:
    the last one. What is not finite is left out; `notes` tells it.

    num_items: items of all files, those without a vector too; their numbers begin at 0. roots: see
    media_of. configurations: of outputs of `embed`: {digest: {"model": name, "values": ...}}.
    """

    def __init__(
        self, names: Sequence[str], column: str | None = None, kinds: KindTable | None = None
    ) -> None:
        """names: of files and folders. column: of tables that are no outputs. kinds: has the
        formats; None: those of all installed plugins. Raises ConfigError for what holds no
        vectors."""
        self.configurations: dict[str, Any] = {}
        self.roots: tuple[str, ...] = ()
        self._states: list[tuple[str, RunState, int]] = []
        self._parts: list[Part] = []
        self.name = ", ".join(names)
        kinds = installed_kinds() if kinds is None else kinds
        for name in dict.fromkeys(names):
            self._open(name, column, kinds)
        counts = [part.num_items for part in self._parts]
        self.num_items = sum(counts)
        self._firsts = np.cumsum([0, *counts])
        self._again = self._repeated()  # items that a later one replaces
        self._bad: set[int] = set()

    def blocks(self) -> Iterator[Block]:
        """Yields the items that have a vector. Raises ConfigError where sizes differ."""
        size: int | None = None
        is_many: bool | None = None
        for first, part in zip(self._firsts.tolist(), self._parts, strict=False):
            for own in part.blocks():
                block = Block(numbers=own.numbers + first, rows=own.rows, lengths=own.lengths)
                if (block.rows.shape[1], own.lengths is not None) != (
                    size or block.rows.shape[1],
                    own.lengths is not None if is_many is None else is_many,
                ):
                    raise ConfigError(self._words_of_sizes(block, size, is_many))
                size, is_many = block.rows.shape[1], own.lengths is not None
                found = self._fine(block)
                if len(found):
                    yield found

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the records of some items; those of other tables have an id and a path."""
        at = np.searchsorted(self._firsts, numbers, "right") - 1
        found: dict[int, Record] = {}
        for index in sorted(set(at.tolist())):
            own = [number for number, part in zip(numbers, at, strict=True) if part == index]
            first = int(self._firsts[index])
            read = self._parts[index].records([number - first for number in own])
            if not self._parts[index].has_ids:  # numbers of this part tell nobody where a row is
                read = [
                    replace(each, id=number + 1) for each, number in zip(read, own, strict=True)
                ]
            found.update(zip(own, read, strict=True))
        return [found[number] for number in numbers]

    def keys(self) -> Iterator[str | None]:
        """Yields what tells the items apart, None of an item without an id."""
        for part in self._parts:
            yield from part.keys() if part.has_ids else itertools.repeat(None, part.num_items)

    @property
    def is_replaced(self) -> NDArray[np.bool_]:
        """Which items a later one replaces."""
        return self._again

    def notes(self) -> list[str]:
        """Returns what was left out and what is missing, in sentences; complete after a pass over
        the blocks."""
        found = []
        if num := int(self._again.sum()):
            found.append(f"{num} items are there again under the same id: the last one counts")
        if self._bad:
            some = sorted(self._bad)[:MAX_NAMED]
            names = ", ".join(repr(own.id) for own in self.records(some))
            more = ", ..." if len(self._bad) > MAX_NAMED else ""
            found.append(
                f"{len(self._bad)} vectors are not finite and were left out: {names}{more}"
            )
        for name, state, num in self._states:
            if state.total is not None and num < state.total:
                found.append(f"{name} has {num} of {state.total} items: its run is not complete")
        found += missing_shards([state for _, state, _ in self._states]).values()
        return found

    def _fine(self, block: Block) -> Block:
        is_finite = block.is_finite()
        if not is_finite.all():
            self._bad.update(block.numbers[~is_finite].tolist())
        return block.chosen(is_finite & ~self._again[block.numbers])

    def _words_of_sizes(self, block: Block, size: int | None, is_many: bool | None) -> str:
        (record,) = self.records([int(block.numbers[0])])
        if size != block.rows.shape[1]:
            words = f"vectors of {size} numbers, and from {record.id!r} on {block.rows.shape[1]}"
        else:
            words = f"one vector of some items and several of others, such as {record.id!r}"
        return f"{self.name!r} has {words}: they are of different models, or of other options"

    def _repeated(self) -> NDArray[np.bool_]:
        """Returns which items a later one replaces."""
        met, last = IdSet(), {}
        for number, key in enumerate(self.keys()):
            if key is not None and not met.add(key):
                last[key] = number
        again = np.zeros(self.num_items, "?")
        if last:
            for number, key in enumerate(self.keys()):
                again[number] = key is not None and last.get(key, number) != number
        return again

    def _open(self, name: str, column: str | None, kinds: KindTable) -> None:
        path = Path(name)
        is_here = not is_remote(name)
        if is_here and not path.exists():
            raise ConfigError(f"{name!r} does not exist; name an output of `embed`, or its files")
        form = known_format(name, None, kinds)
        if is_here and (form is None or has_parts(form)):
            found = _foreign(path, column)
            if found:
                self._parts += found
                return
        output = open_existing(name, kinds)
        parts = _parts_of(output)
        self._parts += parts
        self._know(output.configurations)
        state = RunState.read(output.state_file)
        if state is not None:
            self._states.append((output.name, state, sum(part.num_items for part in parts)))

    def _know(self, configurations: ConfigurationFile) -> None:
        self.configurations.update(configurations.known)
        root = configurations.root
        self.roots += () if root is None else (root,)


def _foreign(path: Path, column: str | None) -> list[Part]:
    """Returns the parts of files that are no output of `embed`, none of such an output."""
    suffix = path.suffix.lower()
    if path.is_dir():
        names = sorted(os.listdir(path), key=natural_key)
        if any(map(PART_NAME.fullmatch, names)) and column is None:
            return []
        shards = [path / own for own in names if own.endswith((".npy", *TABLES))]
        return [part for own in shards for part in _foreign(own, column)]
    if suffix in TABLES:
        part = ParquetPart(partial(_regular, path), str(path), column)
        return [] if part.is_ours else [part]
    if suffix == ".npy":
        check_file(path)
        with path.open("rb") as file:
            head = read_npy_head(file, str(path))
            file.seek(head.end)
            is_ours = file.read(1) == b"\n"  # the digest and the records
        return [] if is_ours else [ArrayPart(path)]
    return []


def _regular(path: Path) -> IO[bytes]:
    return BufferedReader(open_regular(path, os.O_RDONLY))


def _parts_of(output: Readable) -> list[Part]:
    """Returns the parts of an output of `embed`."""
    if isinstance(output, OnePart):
        path = Path(output.name)
        made = _maker(output.form, path.suffix.lower())
        return [RecordsPart(output) if made is None else made(partial(_regular, path), str(path))]
    made = _maker(output.form, output.suffix) if isinstance(output, PartsSink) else None
    if made is None or not isinstance(output, PartsSink):
        return [RecordsPart(output)]
    found = [
        made(partial(output.shelf.open, name), f"{output.shelf.name}/{name}")
        for name in output.parts().values()
    ]
    return [*found, RecordsPart(output, output.growing_entries)]


def _maker(form: PartFormat, suffix: str) -> Callable[[Opened, str], Part] | None:
    """Returns what reads whole parts of a format; None where records are read one by one."""
    if form.has_arrays:
        return partial(OutputArrayPart, form=form)
    return partial(ParquetPart, is_output=True) if suffix in TABLES else None
