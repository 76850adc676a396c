"""Several outputs read together: the shards of a run, in any mixture of formats."""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

from mmdeploy_llm.data.files.chosen_kinds import installed_kinds
from mmdeploy_llm.data.outputs.base import Readable
from mmdeploy_llm.data.outputs.formats import PartFormat, PartReader
from mmdeploy_llm.data.outputs.opening.choose import (
    check_left_out,
    has_parts,
    is_remote,
    known_format,
    open_sink,
    part_format,
)
from mmdeploy_llm.data.outputs.opening.edits import Edits, parted, unnamed
from mmdeploy_llm.data.outputs.parts import PART_NAME, part_formats
from mmdeploy_llm.data.outputs.scan import Entry, RecordIndex
from mmdeploy_llm.data.records.configuration import ConfigurationFile
from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.ids import IdSet
from mmdeploy_llm.data.records.media import Blob, OpenMedia
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.shelves import RemoteShelf
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

RECORDS_AT_ONCE = 5_000  # as many as a row group of Parquet has


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputState:
    """The content of one output. num_items: its items, also those that another output has.
    outcomes: its records, counted by outcome."""

    name: str
    num_items: int
    outcomes: Mapping[str, int]
    run: RunState | None

    @property
    def missing(self) -> str | None:
        """Names what is not there yet; None when it is complete or nothing says what it should
        have."""
        if self.run is None:
            return None
        if self.run.total is not None and self.num_items < self.run.total:
            left = self.run.total - self.num_items
            return f"{left} of {self.run.total} items are not done"
        is_counted = self.run.total is not None
        return None if is_counted or self.run.ending == "done" else "its run has not ended"

    @property
    def num_failed(self) -> int:
        """Records of items that failed."""
        return self.outcomes.get("failed", 0)

    @property
    def label(self) -> str:
        """Its name, with its shard if the run had several."""
        if self.run is None or self.run.num_shards == 1:
            return self.name
        return f"{self.name} (shard {self.run.shard}/{self.run.num_shards})"


class MergedOutputs:
    """The records of several outputs. An item that several of them have counts once: the record of
    the output that was written last, or with outputs at URLs of the one named last. Texts are as
    the files of edits have them that are named with the outputs.

    index: its positions are for `records`. outputs: in the order of the names.
    """

    def __init__(self, names: Sequence[str], kinds: KindTable | None = None) -> None:
        """Raises ConfigError for what is no output of a batch. kinds: has the formats;
        None: those of all installed plugins."""
        names, edits = parted(list(dict.fromkeys(names)))
        if not names:
            raise ConfigError(f"{edits[0]!r} has edits; name the output too that they belong to")
        self._edits = Edits(edits)
        self._unnamed = unnamed(names, edits)
        kinds = installed_kinds() if kinds is None else kinds
        named = [open_existing(name, kinds) for name in names]
        times = [each.modified() for each in named]
        order = sorted(range(len(named)), key=lambda number: times[number] or 0)
        self._sinks = named if None in times else [named[number] for number in order]
        self.index = RecordIndex()
        self._sources, self._positions = array("L"), array("Q")
        self._num_items = Counter[str]()
        self._outcomes = {sink.name: Counter[str]() for sink in self._sinks}
        self._num_read = Counter[str]()  # records of each output, in the first pass
        last = self._repeated()
        num_again = Counter[str]()
        for source, entry in self._all():
            num_again[self._sinks[source].name] += 1
            if last.get(entry.record.key, (source, entry.begin)) == (source, entry.begin):
                place = entry.record.line or len(self._positions)
                record = self._edits.applied(entry.record)
                self.index.add(record, place, len(self._positions))
                self._sources.append(source)
                self._positions.append(entry.begin)
        self.outputs = tuple(
            OutputState(
                name=sink.name,
                num_items=self._num_items[sink.name],
                outcomes=self._outcomes[sink.name],
                run=RunState.read(sink.state_file),
            )
            for sink in named
        )
        self._changed = [name for name, num in self._num_read.items() if num_again[name] != num]
        found = (sink.configurations.models for sink in named)
        self.models = tuple(dict.fromkeys(model for models in found for model in models))

    @property
    def sinks(self) -> tuple[Readable, ...]:
        """The outputs themselves."""
        return tuple(self._sinks)

    @property
    def notes(self) -> list[str]:
        """Notes on edits for a reader: how many are used, and files that are not."""
        return [*self._edits.notes(), *self._unnamed]

    @property
    def num_read(self) -> int:
        """The records that all outputs have, those that a newer one replaces included."""
        return self._num_read.total()

    def records(self, most: int | None = None) -> Iterator[Record]:
        """Yields the records in the order of the input; at most `most`, those that are not ok
        first."""
        yield from (record for record, _ in self._ranked(self.index.offsets(most)))

    def stored_records(self) -> Iterator[tuple[Record, OpenMedia]]:
        """Yields the records in the order of the input, each with what opens the media that its
        output holds."""
        for record, rank in self._ranked(self.index.offsets()):
            sink = self._sinks[self._sources[rank]]
            yield record, partial(sink.stored_media, self._positions[rank])

    def _ranked(self, ranks: Sequence[int]) -> Iterator[tuple[Record, int]]:
        for begin in range(0, len(ranks), RECORDS_AT_ONCE):
            some = ranks[begin : begin + RECORDS_AT_ONCE]
            yield from zip(self._some(some), some, strict=True)

    def _some(self, ranks: Sequence[int]) -> list[Record]:
        """Returns records; opens one output after the other, however many there are."""
        by_source: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by_source[self._sources[rank]].append(rank)
        found: dict[int, Record] = {}
        for source, own in by_source.items():
            positions = [self._positions[rank] for rank in own]
            records = map(self._edits.applied, self._sinks[source].records_at(positions))
            found.update(zip(own, records, strict=True))
        return [found[rank] for rank in ranks]

    def missing(self) -> dict[str, str]:
        """Returns what is incomplete, in words by name: outputs, and shards that are not among
        them."""
        found = {each.label: each.missing for each in self.outputs if each.missing is not None}
        words = "it changed while it was read; write the report again"
        found.update({each.label: words for each in self.outputs if each.name in self._changed})
        return found | missing_shards(each.run for each in self.outputs)

    def _all(self) -> Iterator[tuple[int, Entry]]:
        for source, sink in enumerate(self._sinks):
            for entry in sink.entries():
                yield source, entry

    def _repeated(self) -> Mapping[str, tuple[int, int]]:
        """Returns the last place of each item that has several records; counts the items of each
        output."""
        met, last = IdSet(), {}
        within, known = IdSet(), -1
        for source, entry in self._all():
            key = entry.record.key
            self._num_read[self._sinks[source].name] += 1
            if source != known:
                within, known = IdSet(), source
            if not met.add(key):
                last[key] = source, entry.begin
            name = self._sinks[source].name
            self._num_items[name] += within.add(key)
            self._outcomes[name][entry.record.outcome] += 1
        return last


def missing_shards(runs: Iterable[RunState | None]) -> dict[str, str]:
    """Returns the shards of which no output is among these, in words by the number of all."""
    shards: defaultdict[int, set[int]] = defaultdict(set)
    for run in runs:
        if run is not None:
            shards[run.num_shards].add(run.shard)
    found = {}
    for num_shards, known in shards.items():
        left = sorted(set(range(1, num_shards + 1)) - known)
        if left:
            named = ", ".join(map(str, left[:20])) + (", ..." if len(left) > 20 else "")
            found[f"of {num_shards} shards"] = f"no output of {named} was given"
    return found


class OnePart(Readable):
    """A Parquet file or a tar that is a part of an output, alone."""

    def __init__(self, path: Path, form: PartFormat) -> None:
        self._path, self.name, self.form = path, str(path), form
        self.configurations = ConfigurationFile(
            self.name, path.with_name(f"{path.name}.config.json"), self._embedded
        )
        self.state_file = path.with_name(f"{path.name}.state.json")

    def entries(self) -> Iterator[Entry]:
        """Yields its records."""
        with closing(self._reader()) as reader:
            yield from reader.entries()

    def records_at(self, positions: list[int]) -> Iterator[Record]:
        """Yields the records at these positions."""
        with closing(self._reader()) as reader:
            for position in positions:
                yield reader.at(position)

    @contextmanager
    def stored_media(self, position: int) -> Iterator[Blob | None]:
        """Opens the media of the record at a position."""
        with closing(self._reader()) as reader, reader.media(position) as blob:
            yield blob

    def modified(self) -> int:
        """Returns when the file was written."""
        return os.stat(self._path).st_mtime_ns

    def _reader(self) -> PartReader:
        file = BufferedReader(open_regular(self._path, os.O_RDONLY))
        return self.form.reader(file, self.name, is_open=False)

    def _embedded(self) -> Iterator[str]:
        with closing(self._reader()) as reader:
            text = reader.configurations()
        if text is not None:
            yield text


def open_existing(name: str, kinds: KindTable | None = None) -> Readable:
    """Opens an output for reading, in the format that its files have. kinds: see MergedOutputs.
    Raises ConfigError when there is none."""
    kinds = installed_kinds() if kinds is None else kinds
    path = Path(name)
    if is_remote(name):
        return _opened_parts(name, [*RemoteShelf(name).states()], kinds)
    if not path.exists():
        raise ConfigError(f"{name!r} does not exist; name outputs of batches")
    found = known_format(name, None, kinds)
    if found is not None and not has_parts(found):
        sink = open_sink(name, kinds=kinds)
        sink.check("resume")  # a table that is none of ours has no lines
        return sink
    if path.is_dir():
        return _opened_parts(name, os.listdir(path), kinds)
    form = None if found is None else part_format(found)
    if form is not None:
        return OnePart(path, form)
    if found is None:
        _check_lines(path, kinds)
    return open_sink(name, "jsonl" if found is None else found.spec.name, kinds=kinds)


def _check_lines(path: Path, kinds: KindTable) -> None:
    """Raises ConfigError for a file whose suffix nobody knows and that has no lines of records."""
    with open_regular(path, os.O_RDONLY) as file:
        begin = file.read(1)
    if begin not in (b"{", b""):
        check_left_out(str(path), None)
        raise ConfigError(
            f"{str(path)!r} is not a record of a batch, and outputs that end in "
            f"{path.suffix or 'nothing'} are not known ({' '.join(kinds.outputs)}); if a plugin "
            "has written it, load that (--plugin FILE)"
        )


def _opened_parts(name: str, files: Sequence[str], kinds: KindTable) -> Readable:
    """Opens a folder of parts, whose format the names of its files tell."""
    known = part_formats(kinds)
    found = {match[2] for match in map(PART_NAME.fullmatch, files) if match} & known.keys()
    if not found:
        check_left_out(name, None, files)
    if len(found) != 1:
        raise ConfigError(
            f"{name!r} is not an output of a batch: it has "
            f"{'parts of several formats' if found else 'no parts'}; name a JSONL file, or a "
            "folder with part-00000.parquet or part-00000.tar"
        )
    return open_sink(name, known[found.pop()], kinds=kinds)
