"""Checks of a format of outputs: that its store keeps what a batch counts on, also when the process
is killed or the disk is full."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from mmdeploy_llm.data.outputs.base import OutputPlace
from mmdeploy_llm.data.outputs.opening.choose import opened
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError, PluginError
from mmdeploy_llm.hooks import OutputSinkSpec, RecordStore
from mmdeploy_llm.hooks.factories import build
from mmdeploy_llm.hooks.files import load_named
from mmdeploy_llm.hooks.records import FAULTS, PluginOrigin, Provided
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped, attributed, demand

SECONDS = 60.0
BIG_RECORDS, BIG_TEXT = 2_000, 10_000
TEXTS = {  # what the text of a record may be
    "plain": "A red square.",
    "nothing": "",
    "lines": 'one\ntwo\r\n\t"three" \\ ; , | \x00 \x1f \x7f',
    "other scripts": "K\u00f6ln \u5317\u4eac \u202eabc \U0001f600 \u2028 \ufeff",
    "JSON": '{"id": "x", "text": null}',
    "large": "0123456789" * 300_000,
}
# Runs in a process of its own: adds lines, says the position of each, and ends as `how` says.
PROGRAM = """
import json, os, resource, signal, sys
path, folders, file, factory, lines, how = json.loads(sys.stdin.read())
sys.path[:] = folders
import pathlib, mmdeploy_llm.hooks.files
from mmdeploy_llm.hooks.factories import imported
if file is not None:
    mmdeploy_llm.hooks.files.load_named(pathlib.Path(file), factory.partition(":")[0])
store = imported(factory)(pathlib.Path(path), True)
if how == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, most))
for line in lines:
    try:
        print("AT", store.append(line, json.loads(line)), flush=True)
    except Exception as error:
        print("RAISED", type(error).__name__, flush=True)
        break
if how != "close":
    os.kill(os.getpid(), signal.SIGKILL)
store.close()
"""


@dataclass(kw_only=True)
class OutputSubject:
    """A format to check; see OutputSinkConformance. file: of a plugin that is a single file."""

    spec: OutputSinkSpec
    file: Path | None = None

    @cached_property
    def provided(self) -> Provided[OutputSinkSpec]:
        """The spec with the file of its plugin."""
        module = self.spec.factory.partition(":")[0]
        if self.file is not None:
            load_named(self.file, module)
        name = self.spec.name if self.file is None else self.file.name
        return Provided(
            spec=self.spec, origin=PluginOrigin(name=name, module=module, file=self.file)
        )

    @contextmanager
    def path(self) -> Iterator[Path]:
        """Yields the path of an output that is not there yet."""
        with TemporaryDirectory() as folder:
            yield Path(folder).resolve() / f"out{self.spec.suffixes[0]}"

    def open(self, path: Path, *, writable: bool) -> RecordStore:
        """Opens the store. Raises what the factory raises."""
        try:
            return build(self.spec, self.provided.origin, (path, writable))  # type: ignore[no-any-return]
        except PluginError as error:
            raise error.__cause__ or error from None

    def add(self, path: Path, lines: Sequence[str]) -> list[int]:
        """Adds lines to the store, and returns their positions."""
        with (
            attributed("adding records", "`append` adds any record of a batch"),
            closing(self.open(path, writable=True)) as store,
        ):
            return [store.append(line, json.loads(line)) for line in lines]

    def read(self, path: Path) -> list[tuple[int, str]]:
        """Returns all that the store has."""
        with (
            attributed("reading the output", "`entries` yields (position, line) of each record"),
            closing(self.open(path, writable=False)) as store,
        ):
            return list(store.entries())

    def apart(self, path: Path, lines: Sequence[str], how: str) -> tuple[list[int], bool]:
        """Adds lines in another process, which then dies; returns their positions, and whether
        `append` raised."""
        file = None if self.file is None else str(self.file)
        about = [str(path), sys.path, file, self.spec.factory, list(lines), how]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input=json.dumps(about),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        told = [line.split() for line in done.stdout.splitlines()]
        is_told = told and told[0][0] in ("AT", "RAISED")
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        demand(is_told, f"a process of its own could not write: {last}; make it importable there")
        places = [int(words[1]) for words in told if words[0] == "AT"]
        return places, told[-1][0] == "RAISED"


def lines_of(texts: Sequence[str]) -> list[str]:
    """Returns records with these texts, as a batch writes them; every second one is an error's."""
    return [
        Record(
            id=f"i{number}",
            line=number + 1,
            text=text,
            error=_error(text[:90]) if number % 2 else None,
        ).to_json()
        for number, text in enumerate(texts)
    ]


def _error(message: str) -> ItemError:
    return ItemError(code=400, kind="MediaError", message=message)


def records_come_back_exactly(subject: OutputSubject) -> None:
    """Every record is read as it was written, in its order, all at once and by its position."""
    lines = lines_of(list(TEXTS.values()))
    with subject.path() as path:
        places = subject.add(path, lines)
        found = subject.read(path)
        _demand_rising(places)
        for at, (name, line) in enumerate(zip(TEXTS, lines, strict=True)):
            own = found[at] if at < len(found) else None
            demand(
                own == (places[at], line),
                f"the record whose text is {name!r} was added at {places[at]} as {line:.60} and "
                f"is read as {own!r:.80}; keep the line as it is",
            )
        demand(len(found) == len(lines), f"{len(lines)} records were added, {len(found)} are read")
        with closing(subject.open(path, writable=False)) as store:
            for place, line in list(zip(places, lines, strict=True))[::-1]:
                demand(store.get(place) == line, f"get({place}) returns another record's line")
            with attributed("get of a position that has no record", "raise LookupError"):
                try:
                    store.get(places[-1] + 1000)
                except LookupError:
                    return
        raise CheckFailed("get of a position that has no record returns one; raise LookupError")


def records_are_added_to_what_is_there(subject: OutputSubject) -> None:
    """A store that is opened again goes on: older records stay, positions rise."""
    lines = lines_of(["one", "two", "three", "four"])
    with subject.path() as path:
        places = subject.add(path, lines[:2]) + subject.add(path, lines[2:])
        _demand_rising(places)
        _demand_found(subject, path, list(zip(places, lines, strict=True)), "after two openings")


def removed_records_are_gone(subject: OutputSubject) -> None:
    """Removed records are gone, others keep their positions, which are not given again."""
    lines = lines_of(["one", "two", "three", "four"])
    with subject.path() as path:
        places = subject.add(path, lines)
        with (
            attributed("delete", "it takes any collection of positions"),
            closing(subject.open(path, writable=True)) as store,
        ):
            store.delete([places[1], places[3]])
            added = store.append(lines[1], json.loads(lines[1]))
            store.finish()
        _demand_rising([*places, added])
        left = [(places[0], lines[0]), (places[2], lines[2]), (added, lines[1])]
        _demand_found(subject, path, left, "after two of four were removed and one was added")
        with closing(subject.open(path, writable=True)) as store:
            store.delete([place for place, _ in left])
        _demand_found(subject, path, [], "after all were removed")


def killed_processes_lose_nothing(subject: OutputSubject) -> None:
    """A record is there after `kill -9` once `append` has returned, and the next run goes on."""
    lines = lines_of([f"text {number}" for number in range(20)])
    with subject.path() as path:
        places, _ = subject.apart(path, lines[:12], "kill")
        _demand_found(subject, path, list(zip(places, lines, strict=False)), "after kill -9")
        places += subject.add(path, lines[12:])
        _demand_rising(places)
        _demand_found(subject, path, list(zip(places, lines, strict=True)), "after the next run")


def torn_records_are_passed_over(subject: OutputSubject) -> None:
    """A record that a killed process was writing is passed over, and cut off by the next run."""
    lines = lines_of(["one", "two", "three" * 40])
    with subject.path() as path:
        places = subject.add(path, lines[:2])
        if not path.is_file():
            raise CheckSkipped("an output is a folder: only its author can tear a record of it")
        before = path.read_bytes()
        subject.add(path, lines[2:])
        after = path.read_bytes()
        if not after.startswith(before) or len(after) - len(before) < len(lines[2]) // 2:
            raise CheckSkipped("records are not added at the end of a file: nothing can be torn")
        for at in (1, 2, (len(after) - len(before)) // 2, len(after) - len(before) - 1):
            path.write_bytes(after[: len(before) + at])
            whole = list(zip(places, lines[:2], strict=True))
            _demand_found(subject, path, whole, f"with {at} bytes of a third record")
            (place,) = subject.add(path, lines[2:])
            _demand_found(subject, path, [*whole, (place, lines[2])], "after the next run")


def full_disks_are_told(subject: OutputSubject) -> None:
    """A disk that is full makes `append` raise, and the records before are there."""
    lines = lines_of(["x" * 5_000] * 100)
    with subject.path() as path:
        places, is_raised = subject.apart(path, lines, "full")
        demand(
            is_raised,
            "files may not grow over 200000 bytes, and `append` of 500000 raises nothing; write "
            "unbuffered, or flush, and let the error pass",
        )
        whole = list(zip(places, lines, strict=False))
        _demand_found(subject, path, whole, "after a disk that was full")


def other_files_stay_as_they_are(subject: OutputSubject) -> None:
    """Other files raise and are not changed; reading changes nothing."""
    foreign = {"a text": b"Dear diary,\n" * 100, "a picture": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9}
    for name, content in foreign.items():
        with subject.path() as path:
            path.write_bytes(content)
            try:
                subject.read(path)
            except CheckFailed:
                demand(path.read_bytes() == content, f"{name} was changed while it was read")
                continue
            raise CheckFailed(f"{name} is read as an output; raise an exception when it is opened")
    with subject.path() as path:
        try:
            subject.open(path, writable=False).close()
        except FAULTS:
            demand(not path.exists(), "reading an output that is not there makes it; raise instead")
        else:
            raise CheckFailed("an output that is not there is opened for reading; raise instead")
        subject.add(path, lines_of(["one", "two"]))
        before = path.read_bytes() if path.is_file() else b""
        subject.read(path)
        after = path.read_bytes() if path.is_file() else b""
        demand(before == after, "reading an output changes it; open it so that it stays as it is")


def runs_are_resumed(subject: OutputSubject) -> None:
    """An item that is done again has its newest record; two runs never write at once."""
    records = [Record.from_json(line) for line in lines_of(["one", "two", "three"])]
    with subject.path() as path:
        sink = opened(OutputPlace(name=str(path), provided=subject.provided))
        with attributed("a run", "see the message"):
            with sink.writer("new", Kept()) as writer:
                for record in records:
                    writer.write(record, record.line)
                try:
                    sink.writer("resume", sink.scan(lambda record: record.line)).close()
                except ConfigError:
                    pass
                else:
                    raise CheckFailed("two runs write at once: the output must stay one file")
                writer.finish(lambda record: record.line)
            again = Record.from_json(lines_of(["newer"])[0])
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
    lines = lines_of(["x" * BIG_TEXT] * BIG_RECORDS)
    with subject.path() as path:
        subject.add(path, lines)
        with closing(subject.open(path, writable=False)) as store:
            tracemalloc.start()
            try:
                rows = iter(store.entries())
                next(rows)
                taken = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            close = getattr(rows, "close", None)
            if close is not None:
                close()
    size = BIG_RECORDS * BIG_TEXT
    demand(
        taken < size // 4,
        f"{taken >> 20} MiB were taken for the first record of {size >> 20} MiB; yield one after "
        "the other",
    )


CHECKS: tuple[Check, ...] = (
    records_come_back_exactly,
    records_are_added_to_what_is_there,
    removed_records_are_gone,
    killed_processes_lose_nothing,
    torn_records_are_passed_over,
    full_disks_are_told,
    other_files_stay_as_they_are,
    runs_are_resumed,
    records_are_read_one_by_one,
)


def _demand_rising(places: Sequence[int]) -> None:
    is_rising = all(one < two for one, two in pairwise(places))
    demand(
        is_rising and all(isinstance(own, int) and own >= 0 for own in places),
        f"`append` returned the positions {list(places)!r:.120}; each must be higher than all "
        "before, also than those of records that are gone",
    )


def _demand_found(
    subject: OutputSubject, path: Path, expected: Sequence[tuple[int, str]], when: str
) -> None:
    found = subject.read(path)
    if found != list(expected):
        places = [place for place, _ in found], [place for place, _ in expected]
        raise CheckFailed(
            f"{when} the output has {len(found)} records at {places[0]!r:.80}, not "
            f"{len(expected)} at {places[1]!r:.80}"
            + ("" if places[0] != places[1] else ", or a line of them differs")
            + "; see RecordStore"
        )
