"""Checks of a format of outputs: that its store keeps what a batch counts on, also when the process
is killed or the disk is full."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmdeploy_llm.data.outputs.base import OutputPlace, Sink
from mmdeploy_llm.data.outputs.opening.choose import opened
from mmdeploy_llm.data.outputs.opening.stored import StoreSink
from mmdeploy_llm.data.outputs.scan import DROPPED, Kept, Mode, RecordIndex
from mmdeploy_llm.data.records.files import OutputLostError
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import OutputSinkSpec
from mmdeploy_llm.hooks.records import FAULTS, PluginOrigin, Provided
from mmdeploy_llm.testing.models.base import (
    Check,
    CheckFailed,
    CheckSkipped,
    attributed,
    demand,
    since,
)

SECONDS = 60.0
MODES: tuple[Mode, ...] = ("resume", "overwrite")
# A large output: so many bytes in as many records as a store adds in these seconds. Where each
# record is a transaction or a version, there are fewer, and they are larger.
BIG_SIZE, MOST_RECORDS, LEAST_RECORDS, ADDING_SECONDS = 20_000_000, 2_000, 100, 2.0
SMALL, MOST_BYTES = 5_000, 200_000  # of a record; that a file may have on a full disk
TEXTS = {  # what the text of a record may be
    "plain": "A red square.",
    "nothing": "",
    "lines": 'one\ntwo\r\n\t"three" \\ ; , | \x00 \x1f \x7f',
    "other scripts": "K\u00f6ln \u5317\u4eac \u202eabc \U0001f600 \u2028 \ufeff",
    "JSON": '{"id": "x", "text": null}',
    "large": "0123456789" * 300_000,
}
# Begins a program that runs in a process of its own.
SUBJECT = """
import json, os, resource, signal, sys
from pathlib import Path
given = json.load(sys.stdin)
sys.path[:] = given["path"]
from mmdeploy_llm.data.outputs.opening.choose import opened
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.hooks import OutputSinkSpec
from mmdeploy_llm.testing.data.outputs import OutputSubject
file = None if given["file"] is None else Path(given["file"])
subject = OutputSubject(spec=OutputSinkSpec(**given["spec"]), file=file)
"""
# Adds records, says so after each, and dies.
ADDING = """
records = map(Record.from_json, given["records"])
most_bytes = given["most_bytes"]
sink = opened(subject.place(Path(given["output"])))
writer = sink.writer("resume", sink.scan(lambda record: record.line, retried=NOTHING))
if most_bytes is not None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
for record in records:
    try:
        writer.write(record, record.line)
        print("ADDED", flush=True)
    except Exception as error:
        print("RAISED", type(error).__name__, flush=True)
        break
os.kill(os.getpid(), signal.SIGKILL)
"""
# Removes records many times, each time killed elsewhere, and says what was wrong.
REMOVING = """
from mmdeploy_llm.testing.data.removing import report
sink = opened(subject.place(Path(given["output"])))
again = lambda path: opened(subject.place(path))
print(json.dumps(report(sink, again, given["positions"])))
"""
NUM_REMOVED = 40


@dataclass(kw_only=True)
class OutputSubject:
    """A format to check; see OutputSinkConformance. file: of a plugin that is a single file."""

    spec: OutputSinkSpec
    file: Path | None = None

    def place(self, path: Path, part_items: int | None = None) -> OutputPlace:
        """Returns what an output at a path is opened with."""
        name = self.spec.name if self.file is None else self.file.name
        module = self.spec.factory.partition(":")[0]
        origin = PluginOrigin(name=name, module=module, file=self.file)
        provided = Provided(spec=self.spec, origin=origin)
        return OutputPlace(name=str(path), provided=provided, part_items=part_items)

    @contextmanager
    def output(self, part_items: int | None = None) -> Iterator[tuple[Path, Sink]]:
        """Yields an output that is not there yet, with its path."""
        with TemporaryDirectory() as folder:
            path = Path(folder).resolve() / f"out{self.spec.suffixes[0]}"
            with attributed("opening an output", "see `factory` of OutputSinkSpec"):
                sink = opened(self.place(path, part_items))
            yield path, sink

    def apart(
        self, path: Path, records: Sequence[Record], most_bytes: int | None = None
    ) -> tuple[int, bool]:
        """Adds records in another process, which then dies; returns how many were added, and
        whether one was refused. most_bytes: that a file may have."""
        lines = [record.to_json() for record in records]
        said = self.in_process(ADDING, path, records=lines, most_bytes=most_bytes)
        told = [line.split()[0] for line in said]
        return told.count("ADDED"), "RAISED" in told

    def in_process(self, program: str, path: Path, **given: Any) -> list[str]:
        """Runs a program on an output in another process, which has the subject; returns the lines
        that it prints. Raises CheckFailed where there are none."""
        given |= {
            "path": sys.path,
            "spec": asdict(self.spec),
            "file": None if self.file is None else str(self.file),
            "output": str(path),
        }
        done = subprocess.run(
            [sys.executable, "-c", SUBJECT + program],
            input=json.dumps(given).encode(),
            capture_output=True,
            timeout=SECONDS,
        )
        told = done.stdout.decode().splitlines()
        last = (done.stderr.decode().splitlines() or [f"exit status {done.returncode}"])[-1]
        demand(bool(told), f"a process of its own could not write: {last}")
        return told


def records_of(texts: Sequence[str]) -> list[Record]:
    """Returns records with these texts; every second one is of an item that failed."""
    return [
        Record(
            id=f"i{number}",
            line=number + 1,
            text=text,
            error=_error(text[:90]) if number % 2 else None,
        )
        for number, text in enumerate(texts)
    ]


def _error(message: str) -> ItemError:
    return ItemError(code=400, kind="MediaError", message=message)


def records_come_back_exactly(subject: OutputSubject) -> None:
    """Every record is read as it was written, in its order, all at once and by its position."""
    records = records_of(list(TEXTS.values()))
    with subject.output() as (_, sink):
        index = _add(sink, records)
        found = _read(sink)
        for at, (name, record) in enumerate(zip(TEXTS, records, strict=True)):
            own = found[at] if at < len(found) else None
            demand(
                own == record,
                f"the record whose text is {name!r} is read as {own!r:.80}; keep the line as it is",
            )
        demand(len(found) == len(records), f"{len(found)} records are read of {len(records)}")
        _demand_at(sink, index.offsets()[::-1], records[::-1])
        with attributed("reading a position that has no record", "`get` raises LookupError"):
            try:
                list(sink.records_at([index.offsets()[-1] + 1000]))
            except (OutputLostError, ConfigError):
                return
    raise CheckFailed("get of a position that has no record returns one; raise LookupError")


def records_are_added_to_what_is_there(subject: OutputSubject) -> None:
    """An output that is opened again goes on: older records stay, positions rise."""
    records = records_of(["one", "two", "three", "four"])
    with subject.output() as (_, sink):
        _add(sink, records[:2])
        index = _add(sink, records[2:])
        _demand_found(sink, records, "after two openings")
        _demand_at(sink, index.offsets(), records)


def removed_records_are_gone(subject: OutputSubject) -> None:
    """Removed records are gone, others stay at positions that are known, and one that is added
    later has another."""
    records = records_of(["one", "two", "three", "four"])
    with subject.output() as (_, sink):
        _add(sink, records)
        index = _add(sink, records[1:2], {2, 4})
        left = [records[0], records[2], records[1]]
        _demand_found(sink, left, "after two of four were removed and one was added")
        _demand_at(sink, index.offsets(), records[:3])
        _add(sink, [], {1, 2, 3})
        _demand_found(sink, [], "after all were removed")


def killed_processes_lose_nothing(subject: OutputSubject) -> None:
    """A record is there after `kill -9` once it was written, and the next run goes on."""
    records = records_of([f"text {number}" for number in range(20)])
    with subject.output() as (path, sink):
        subject.apart(path, records[:12])
        _demand_found(sink, records[:12], "after kill -9")
        _add(sink, records[12:])
        _demand_found(sink, records, "after the next run")


@since(1, 2)
def removals_are_all_or_none(subject: OutputSubject) -> None:
    """A process that dies in the midst of a removal has removed all of its records or none, and
    lost no other."""
    records = records_of([f"{number} {_unpackable(300)}" for number in range(NUM_REMOVED * 2)])
    with subject.output() as (path, sink):
        if not isinstance(sink, StoreSink) or not hasattr(os, "fork"):
            raise CheckSkipped("it is no RecordStore, or this system cannot fork processes")
        positions = _add(sink, records).offsets()
        told = json.loads(subject.in_process(REMOVING, path, positions=positions[::2])[-1])
    if told.get("skipped"):
        raise CheckSkipped(told["skipped"])
    demand(
        not told,
        f"`delete` of {NUM_REMOVED} records that was killed {told.get('when')} leaves "
        f"{told.get('there')} of them, and {len(told.get('lost', ()))} others are lost "
        f"({told.get('error') or 'read again'}); write a copy without them and put it in the place "
        "of the output by os.replace, or use one transaction",
    )


def torn_records_are_passed_over(subject: OutputSubject) -> None:
    """A record that a killed process was writing is passed over, and cut off by the next run."""
    records = records_of(["one", "two", "three" * 40])
    with subject.output() as (path, sink):
        _add(sink, records[:2])
        if not path.is_file():
            raise CheckSkipped("an output is no file alone: only its author can tear a record")
        before = path.read_bytes()
        _add(sink, records[2:])
        after = path.read_bytes()
        if not after.startswith(before) or len(after) - len(before) < 200:
            raise CheckSkipped("records are not added at the end of a file: nothing can be torn")
        for at in (1, 2, (len(after) - len(before)) // 2, len(after) - len(before) - 1):
            path.write_bytes(after[: len(before) + at])
            _demand_found(sink, records[:2], f"with {at} bytes of a third record")
            _add(sink, records[2:])
            _demand_found(sink, records, "after the next run")


def full_disks_are_told(subject: OutputSubject) -> None:
    """A disk that is full refuses a record, and the records before are there."""
    # The last one is too large for any file alone, where each record has a file of its own.
    texts = [_unpackable(size) for size in (*[SMALL] * 100, 3 * MOST_BYTES)]
    records = records_of(texts)
    with subject.output() as (path, sink):
        num_added, is_refused = subject.apart(path, records, MOST_BYTES)
        demand(
            is_refused,
            f"files may not grow over {MOST_BYTES} bytes, and `append` of {sum(map(len, texts))} "
            "raises nothing; write unbuffered, or flush, and let the error pass",
        )
        _demand_found(sink, records[:num_added], "after a disk that was full")


def _unpackable(size: int) -> str:
    """Returns a text that no store makes much shorter."""
    return base64.b64encode(random.Random(size).randbytes(size))[:size].decode()


def other_files_stay_as_they_are(subject: OutputSubject) -> None:
    """Other files raise and are not changed; reading changes nothing."""
    foreign = {"a text": b"Dear diary,\n" * 100, "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9}
    for name, content in foreign.items():
        with subject.output() as (path, sink):
            path.write_bytes(content)
            try:
                sink.check("resume")
                list(sink.entries())
            except FAULTS:
                demand(path.read_bytes() == content, f"{name} was changed while it was read")
                continue
            raise CheckFailed(f"{name} is read as an output; raise an exception when it is opened")
    with subject.output() as (path, sink):
        with suppress(*FAULTS):
            list(sink.entries())
        demand(not path.exists(), "reading an output that is not there makes it; raise instead")
        _add(sink, records_of(["one", "two"]))
        before = path.read_bytes() if path.is_file() else b""
        _read(sink)
        after = path.read_bytes() if path.is_file() else b""
        demand(before == after, "reading an output changes it; open it so that it stays as it is")


def runs_are_resumed(subject: OutputSubject) -> None:
    """An item that is done again has its newest record; two runs never write at once."""
    records = records_of(["one", "two", "three"])
    with subject.output() as (_, sink):
        with attributed("a run", "see the message"):
            with sink.writer("new", Kept()) as writer:
                for record in records:
                    writer.write(record, record.line)
                for mode in MODES:
                    with suppress(ConfigError):
                        sink.writer(mode, sink.scan(lambda record: record.line)).close()
                        raise CheckFailed("two runs write at once: the output must stay one file")
                writer.finish(lambda record: record.line)
            again = records_of(["newer"])[0]
            kept = sink.scan(lambda record: record.line)
            with sink.writer("resume", kept) as writer:
                writer.write(again, 1)
                writer.finish(lambda record: record.line)
            found = {str(entry.record.id): entry.record.text for entry in sink.entries()}
        expected = {"i0": "newer", "i2": "three"}  # the failed one is left to be done again
        demand(
            found == expected,
            f"after an item was done again the output has {found!r:.200}, not {expected!r}; see "
            "`delete`",
        )


def records_are_read_one_by_one(subject: OutputSubject) -> None:
    """The first record of a large output comes before the others are read."""
    num_records = _num_records(subject)
    with subject.output() as (_, sink):
        _add(sink, records_of(["x" * (BIG_SIZE // num_records)] * num_records))
        tracemalloc.start()
        try:
            entries = sink.entries()
            next(entries)
            taken, _ = tracemalloc.get_traced_memory()  # opening it may take more for a moment
        finally:
            tracemalloc.stop()
    demand(
        taken < BIG_SIZE // 4,
        f"{taken >> 20} MiB were taken for the first record of {BIG_SIZE >> 20} MiB; yield one "
        "after the other",
    )


def _num_records(subject: OutputSubject) -> int:
    """Returns how many records make a large output, by the time that a few take."""
    few = records_of(["x" * (BIG_SIZE // MOST_RECORDS)] * 20)
    with subject.output() as (_, sink):
        begin = time.perf_counter()
        _add(sink, few)
        seconds = (time.perf_counter() - begin) / len(few)
    return max(LEAST_RECORDS, min(MOST_RECORDS, int(ADDING_SECONDS / seconds)))


CHECKS: tuple[Check, ...] = (
    records_come_back_exactly,
    records_are_added_to_what_is_there,
    removed_records_are_gone,
    killed_processes_lose_nothing,
    removals_are_all_or_none,
    torn_records_are_passed_over,
    full_disks_are_told,
    other_files_stay_as_they_are,
    runs_are_resumed,
    records_are_read_one_by_one,
)


def _add(sink: Sink, records: Sequence[Record], dropped: Collection[int] = ()) -> RecordIndex:
    """Adds records to an output, without the records of dropped lines; returns where all are."""

    def place_of(record: Record) -> int | None:
        return DROPPED if record.line in dropped else record.line

    with (
        attributed("adding records", "`append` adds any record of a batch; see RecordStore"),
        sink.writer("resume", sink.scan(place_of, retried=NOTHING)) as writer,
    ):
        for record in records:
            writer.write(record, record.line)
        return writer.index


def _read(sink: Sink) -> list[Record]:
    with attributed("reading the output", "`entries` yields (position, line) of each record"):
        return [entry.record for entry in sink.entries()]


def _demand_found(sink: Sink, expected: Sequence[Record], when: str) -> None:
    found = _read(sink)
    names = [record.id for record in found], [record.id for record in expected]
    demand(
        found == list(expected),
        f"{when} the output has the records {names[0]!r:.80}, not {names[1]!r:.80}"
        + ("" if names[0] != names[1] else "; a line of them differs"),
    )


def _demand_at(sink: Sink, positions: list[int], expected: Sequence[Record]) -> None:
    with attributed("reading records by their positions", "a record keeps its own; see `get`"):
        found = list(sink.records_at(positions))
    demand(found == list(expected), f"positions {positions!r:.80} have other records; see `get`")
