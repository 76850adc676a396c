"""TableRows: the rows of a table that a child reads. One that dies costs what it was reading."""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.data.rows.rows import BadItem, Lines, Row, table_row
from mmdeploy_llm.errors import ConfigError, WorkerDiedError
from mmdeploy_llm.hooks.records import describe
from mmdeploy_llm.system.processes import Worker, finalize_here

from .encoding import decode
from .places import Cursor, Place, Table, after, lost_item
from .serve import RowsRequest, Spec, open_table, serve

START_SECONDS = 60.0
PIECE_SECONDS = 300.0  # without a sign of life: a store may be slow, and a row group large
MAX_STARTS = 3  # of a child that ends before it is ready
MAX_ROWS_LOST = 3  # one by one in a row group or batch; then what is left of it is lost
OWN_MEMORY = "memory:"  # fsspec's files in the memory of a process
PACKAGES = {"pyarrow": "pyarrow", "lance": "pylance", "datasets": "datasets"}
NEEDS = {  # kind of a table -> the module that reads it, its format and the extra
    "parquet": ("pyarrow", "of the format Parquet", "parquet"),
    "arrow": ("pyarrow", "of the format Arrow", "parquet"),
    "lance": ("lance", "a Lance table", "lance"),
    "hub": ("datasets", "a dataset", "datasets"),
}


class TableRows:
    """The rows of a table.

    Raises ConfigError when its library is missing or the table cannot be opened.
    """

    is_table = True
    is_by_suffix = False
    is_repeatable = True

    def __init__(self, spec: Spec) -> None:
        _check_library(spec)
        self._spec = replace(spec, mark=secrets.token_hex(8))
        self._idle: list[_Child] = []
        self._table: Table | None = None
        self._counted: int | None = None
        self._states: list[tuple[int, int] | None] = []
        if any(file.path.startswith(OWN_MEMORY) for file in spec.files):
            self._table = open_table(spec)  # this process has made it, and no child sees it
            self._counted, self._states = self._table.num_rows, _states(spec)
            return
        try:
            child = _Child(self._spec)
        except _EndedError as ended:  # a file that ends a process: the others are read
            if spec.format is not None:  # no file has been opened yet
                about = f"{describe(spec.format.spec)} of {spec.format.origin}"
                raise ConfigError(f"{spec.given!r}: {about} cannot be loaded: {ended}") from None
            self._spec = replace(self._spec, is_counted=False)
            return
        self._counted = child.num_rows
        if self._counted is not None:
            self._states = _states(spec)
        self._idle.append(child)

    @property
    def num_rows(self) -> int | None:
        """The number of rows, counted again when the files have changed; None when that is known
        only after reading them."""
        if self._counted is not None and (states := _states(self._spec)) != self._states:
            self._states = states
            try:
                self._counted = _Child(self._spec).num_rows
            except (ConfigError, _EndedError):
                self._counted = None
        return self._counted

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows in order, each once. What cannot be read becomes a BadItem. Raises
        ConfigError when no child lives long enough to read anything."""
        if self._table is not None:
            for piece in self._table.pieces(Cursor(lines=lines)):
                yield from self._rows(piece.lines, piece.columns, piece.faults, piece.now.file)
            return
        progress = _Progress(lines)
        while True:
            child = self._idle.pop() if self._idle else None
            try:
                child = child or self._started()
                for message in child.messages(lines, progress.place, progress.careful):
                    file = progress.place.file
                    progress.met(message)
                    if lines.is_past(progress.place.line):
                        child.finish()
                    yield from self._rows(
                        message["lines"], message["columns"], _faults(message), file
                    )
                return
            except _EndedError as ended:
                yield from progress.lose(str(ended))
            finally:
                if child is not None and child.is_idle:
                    self._idle.append(child)
                elif child is not None:
                    child.close()

    def _started(self) -> _Child:
        """Returns a child that is ready. One that ends as it starts has read nothing, so no row is
        lost by it: it opens no file where it need not count rows."""
        for _ in range(MAX_STARTS):
            try:
                return _Child(self._spec)
            except _EndedError as ended:
                self._spec, reason = replace(self._spec, is_counted=False), str(ended)
        raise ConfigError(
            f"{self._spec.given!r} cannot be read: the process that reads it has ended "
            f"{MAX_STARTS} times as it started: {reason}"
        )

    def _rows(
        self,
        lines: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        faults: Sequence[BadItem],
        file: int,
    ) -> Iterator[Row | BadItem]:
        folder = self._spec.files[file].folder if file < len(self._spec.files) else None
        left = list(faults)
        cells = zip(*columns.values(), strict=True) if columns else (() for _ in lines)
        for line, row in zip(lines, cells, strict=True):
            while left and left[0].line < line:
                yield left.pop(0)
            yield table_row(line, dict(zip(columns, row, strict=True)), folder)
        yield from left


class _EndedError(Exception):
    """The child has ended, or cannot go on; the message says why."""


class _Progress:
    """Keeps what has been read, and decides what is lost when a child ends."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.place = Place()
        self.careful: tuple[int, int] | None = None
        self._lost, self._name = Place(file=1, line=2), "the table"
        self._begin = 0  # the row at which the careful reading has begun
        self._num_lost = 0  # rows of this unit

    def met(self, message: Mapping[str, Any]) -> None:
        """Notes where the child is."""
        self.place, self._lost = Place.of(message["now"]), Place.of(message["lost"])
        self._name = message["name"]

    def lose(self, reason: str) -> list[BadItem]:
        """Goes on after the child has ended: first the same again, one row at a time; then without
        the row that ends it, or without what is left of the row group or batch."""
        here = self.place
        if self.careful != here.unit:
            self.careful, self._begin, self._num_lost = here.unit, here.row, 0
            return []
        is_row = here.row > self._begin and self._num_lost < MAX_ROWS_LOST
        if is_row and self._lost.file == here.file:
            bad = BadItem(line=here.line, message=f"the row cannot be read: {reason}")
            self.place = replace(here, row=here.row + 1, line=here.line + 1)
            self._begin, self._num_lost = here.row + 1, self._num_lost + 1
        else:
            bad = lost_item(self._name, here, self._lost, reason)
            self.place, self.careful = after(here, self._lost), None
        return [bad] if self._lines.takes(bad.line) else []


class _Child:
    """A process that reads one table. Used by one thread at a time.

    Raises ConfigError when the table cannot be opened, _EndedError when the process has died of it.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._worker = Worker("the process that reads it", serve, is_quiet=True)
        # Also when nobody closes it: a corpus is a value that is simply dropped.
        self.close = finalize_here(self, self._worker.kill)
        self.is_idle = False
        try:
            self._worker.send(spec)
            hello = self._receive(START_SECONDS)
            if "error" in hello:
                raise ConfigError(hello["error"])
        except BaseException:
            self.close()
            raise
        self.num_rows: int | None = hello["num_rows"]

    def messages(
        self, lines: Lines, place: Place, careful: tuple[int, int] | None
    ) -> Iterator[dict[str, Any]]:
        """Yields what the child sends of the wanted rows from a place on."""
        self.is_idle = False
        self._send(RowsRequest(lines=lines, place=place, careful=careful))
        while not self.is_idle:
            message = self._receive(PIECE_SECONDS)
            if "ended" not in message:
                yield message
            elif message["ended"]:
                raise _EndedError(message["ended"])
            else:
                self.is_idle = True

    def finish(self) -> None:
        """Waits until the child has nothing more to send, which it has not after the last row."""
        while "ended" not in self._receive(PIECE_SECONDS):
            pass
        self.is_idle = True

    def _send(self, wanted: RowsRequest) -> None:
        try:
            self._worker.send(wanted)
        except WorkerDiedError as error:
            raise _EndedError(str(error)) from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        try:
            frame = self._worker.receive_frame(seconds, self._spec.max_bytes)
            return decode(frame, self._spec.mark)
        except TimeoutError:
            raise _EndedError(f"it was not read within {seconds:g} seconds") from None
        except WorkerDiedError as died:
            raise _EndedError(str(died)) from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise _EndedError("the process that reads it sent what cannot be read") from None


def _states(spec: Spec) -> list[tuple[int, int] | None]:
    """Returns the size and time of change of each local file; None for one that is gone."""
    found: list[tuple[int, int] | None] = []
    for file in spec.files:
        try:
            state = None if file.is_remote else os.stat(file.path)
        except OSError:
            state = None
        found.append(None if state is None else (state.st_size, state.st_mtime_ns))
    return found


def _faults(message: Mapping[str, Any]) -> list[BadItem]:
    return [
        BadItem(line=line, id=own, message=text, code=code)
        for line, own, text, code in message["faults"]
    ]


def _check_library(spec: Spec) -> None:
    """Raises ConfigError when the library is missing, without importing it here."""
    if spec.format is not None:
        return
    module, kind, extra = NEEDS[spec.kind]
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        name = spec.files[0].path if spec.files else spec.given
        raise ConfigError(
            f"{name!r} is {kind}, and reading it needs {PACKAGES[module]}: "
            f'pip install "mmdeploy-llm[{extra}]", or give a JSONL file or WebDataset shards'
        )
