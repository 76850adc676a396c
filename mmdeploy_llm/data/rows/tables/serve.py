"""The child that reads one table: it is told where to begin and which rows are wanted, and sends
them piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.rows import MAX_SHOWN, BadItem, Lines
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import CorpusFormatSpec
from mmdeploy_llm.hooks.records import Provided
from mmdeploy_llm.system.portable.libraries import c_library
from mmdeploy_llm.system.processes import Channel
from mmdeploy_llm.system.processes.frames import send
from mmdeploy_llm.system.processes.helper import drop_outputs, limit_memory

from .arrow import use_system_memory
from .encoding import Encoder, TooLargeError
from .places import Cursor, Piece, Place, Table

MEMORY = 2**30  # bytes that the child may take, whatever is read
MEMORY_FACTOR = 5  # and so much for each byte of what is read, on the disk
UNSIZED_BYTES = 2**30  # taken for what is read of a table whose size is not known: Lance, the hub
NUM_ARENAS = 2  # of glibc: each can take 64 MiB of address space
M_ARENA_MAX = -8
TOO_LARGE = (TooLargeError, RecursionError, MemoryError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """Which table a child reads.

    kind: "parquet", "arrow", "lance", "hub", or "plugin", which `format` reads. given: what the
        caller has named. max_bytes: of one media item. mark: see encoding.py. is_counted: whether
        the files are opened at once, to count.
    """

    kind: str
    given: str
    files: Sequence[File] = ()
    max_bytes: int
    mark: str = ""
    is_counted: bool = True
    format: Provided[CorpusFormatSpec] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """A call of the child: rows from a place on. careful: the unit that has failed before."""

    lines: Lines
    place: Place
    careful: tuple[int, int] | None


def open_table(spec: Spec) -> Table:
    """Opens a table. Raises ConfigError when it cannot be opened."""
    if spec.kind == "parquet":
        from .parquet import ParquetTable

        return ParquetTable(spec.files, is_counted=spec.is_counted)
    if spec.kind == "arrow":
        from .ipc import ArrowTable

        return ArrowTable(spec.files, is_counted=spec.is_counted)
    if spec.kind == "lance":
        from .lance_table import LanceTable

        return LanceTable(spec.given)
    if spec.format is not None:
        from .foreign import ForeignTable

        return ForeignTable(spec.files, spec.format, spec.max_bytes)
    from .hub import HubTable

    return HubTable(spec.given)


def serve(channel: Channel) -> None:
    """Reads a Spec, says how many rows its table has, and serves calls until the parent ends."""
    spec: Spec = channel.receive()
    _be_quiet()
    encoder = Encoder(spec.mark, spec.max_bytes)
    try:
        use_system_memory()
        _bound(0 if spec.files else UNSIZED_BYTES)
        table = open_table(spec)
    except BaseException as error:  # the libraries raise anything
        text = f"{spec.given!r} cannot be opened: {_reason(error)}"
        own = str(error) if isinstance(error, ConfigError) else text
        send(channel.connection, *encoder.encode({"error": own}))
        return
    send(channel.connection, *encoder.encode({"num_rows": table.num_rows}))
    while True:
        _answer(channel, encoder, table, channel.receive())


def _answer(channel: Channel, encoder: Encoder, table: Table, wanted: RowsRequest) -> None:
    """Sends the wanted rows; at the end, or when it cannot go on, says so."""
    cursor = Cursor(lines=wanted.lines, now=wanted.place, careful=wanted.careful, bound=_bound)
    ended = ""
    try:
        for piece in table.pieces(cursor):
            for message in messages(encoder, piece, cursor):
                send(channel.connection, *message)
    except BrokenPipeError:  # the parent has gone: nobody can be told
        raise
    except BaseException as error:  # the libraries raise anything, panics of Rust too
        ended = _reason(error)
    send(channel.connection, *encoder.encode({"ended": ended}))


def messages(encoder: Encoder, piece: Piece, cursor: Cursor) -> Iterator[tuple[bytes, list[Any]]]:
    """Yields a piece as one message, or a message for each row when together they are too large."""
    try:
        message = encoder.encode(_fields(piece))
        if piece.lines:
            cursor.fit(len(piece.lines), len(message[0]) + sum(map(len, message[1])))
        yield message
        return
    except TOO_LARGE:
        pass
    faults = list(piece.faults)
    for at, line in enumerate(piece.lines):
        before = [bad for bad in faults if bad.line < line]
        faults = faults[len(before) :]
        left = piece.now.line - line - 1
        now = replace(piece.now, row=piece.now.row - left, line=line + 1)
        columns = {name: cells[at : at + 1] for name, cells in piece.columns.items()}
        part = replace(piece, now=now, lines=[line], columns=columns, faults=before)
        try:
            yield encoder.encode(_fields(part))
        except TOO_LARGE as error:
            bad = BadItem(line=line, message=f"the row cannot be used: {error}", code=413)
            yield encoder.encode(
                _fields(replace(part, lines=(), columns={}, faults=[*before, bad]))
            )
    yield encoder.encode(_fields(replace(piece, lines=(), columns={}, faults=faults)))


def _fields(piece: Piece) -> dict[str, Any]:
    return {
        "lines": piece.lines,
        "columns": piece.columns,
        "faults": [[bad.line, bad.id, bad.message, bad.code] for bad in piece.faults],
        "now": piece.now.numbers(),
        "lost": piece.lost.numbers(),
        "name": piece.name,
    }


def _bound(num_bytes: int) -> None:
    limit_memory(MEMORY + MEMORY_FACTOR * num_bytes)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"


def _be_quiet() -> None:
    """Silences what C++ and Rust say when they end the process, and bounds its address space: the
    limit of memory counts that."""
    drop_outputs()
    with contextlib.suppress(AttributeError):
        getattr(c_library(), "mallopt")(M_ARENA_MAX, NUM_ARENAS)  # noqa: B009
