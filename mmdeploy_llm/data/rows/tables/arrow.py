"""Turns batches of Arrow into rows of Python values. The only file here that imports pyarrow.

pyarrow trusts a file of the IPC format: offsets that lead outside of a buffer yield whatever lies
there in memory. So a batch is validated in full before a value of it is looked at. What is wrong is
an error of its row where the row can be told, else of the batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from mmdeploy_llm.data.rows.rows import MAX_SHOWN, BadItem

from .places import Cursor, Piece

MAX_FREE_ROWS = 2**20  # of a file, however few bytes it has
ROWS_PER_BYTE = 64  # beyond those: more, such as 2**50 rows of nulls, are a lie or a bomb
MAX_LOST_PIECES = 16  # in a row, without one good row: then the rest of the batch is lost
MAX_DEPTH = 64  # of nested types


class NeedsCareError(Exception):
    """Memory ran out while several rows were read at once; one may fit."""


class DamagedError(ValueError):
    """A batch that must not be looked at."""


def library(name: str = "pyarrow") -> Any:
    """Returns pyarrow or one of its modules. Raises ImportError."""
    return importlib.import_module(name)


def use_system_memory() -> None:
    """Makes pyarrow take memory from the system as it needs it: its own pool reserves a gigabyte
    at once, which a limit of memory refuses."""
    library().set_memory_pool(library().system_memory_pool())


def faults() -> tuple[type[Exception], ...]:
    """Returns what pyarrow and the conversion to Python raise for what is damaged or cannot be
    held: among them dates out of Python's range and texts that are not UTF-8."""
    arithmetic = (ArithmeticError, LookupError, ValueError, TypeError)
    return (library().ArrowException, OSError, RecursionError, *arithmetic)


def no_memory() -> tuple[type[BaseException], ...]:
    """Returns what is raised when memory runs out."""
    return (MemoryError, library().ArrowMemoryError)


def can_hold(num_bytes: int, num_rows: int) -> bool:
    """Returns whether so many bytes can sensibly hold so many rows."""
    return 0 <= num_rows <= MAX_FREE_ROWS + ROWS_PER_BYTE * num_bytes


def check_depth(schema: Any) -> None:
    """Raises DamagedError for types that are nested too deeply."""
    todo = [(field.type, 1) for field in schema]
    while todo:
        kind, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise DamagedError(f"its types are nested more than {MAX_DEPTH} deep")
        todo += [(kind.field(number).type, depth + 1) for number in range(kind.num_fields)]


def batch_pieces(batch: Any, cursor: Cursor) -> Iterator[Piece]:
    """Yields the wanted rows of a batch, a few at once. Raises one of `faults` where the rest of it
    is lost, and NeedsCareError."""
    batch = _known_zones(batch)
    damaged = _damaged(batch)
    begin, num_lost = 0, 0
    while begin < batch.num_rows and not cursor.is_past:
        size = 1 if cursor.is_careful else cursor.size
        piece = batch.slice(begin, size)
        lines, columns, bad = _rows(piece, cursor, damaged)
        num_lost = num_lost + 1 if bad and not lines else 0
        if num_lost > MAX_LOST_PIECES:
            raise DamagedError(f"no row of many can be read; the last: {bad[-1].message}")
        begin += piece.num_rows
        yield cursor.took(piece.num_rows, lines, columns, bad)


def _rows(
    piece: Any, cursor: Cursor, damaged: Sequence[str]
) -> tuple[list[int], dict[str, list[Any]], list[BadItem]]:
    """Returns the numbers and columns of the wanted rows of a piece that can be read, and the
    errors of the others."""
    first = cursor.now.line
    numbers = range(first, first + piece.num_rows)
    wanted = [line for line in numbers if cursor.lines.takes(line)]
    is_whole = len(wanted) == len(numbers) and not damaged
    try:
        if is_whole:
            return wanted, _values(piece), []
    except no_memory():
        if piece.num_rows > 1:
            raise NeedsCareError from None
    except faults():
        pass  # one of the rows cannot be converted: each is tried below, and named
    good, bad = [], []
    columns: dict[str, list[Any]] = {name: [] for name in piece.schema.names}
    for line in wanted:  # of the others nothing is copied
        try:
            for name, cells in _row(piece.slice(line - first, 1), damaged).items():
                columns[name] += cells
            good.append(line)
        except no_memory():
            bad.append(BadItem(line=line, message="the row needs more memory than is allowed"))
        except faults() as error:
            bad.append(BadItem(line=line, message=str(error)))
    return good, columns, bad


def _row(row: Any, damaged: Sequence[str]) -> dict[str, list[Any]]:
    """Returns the columns of one row. Raises one of `faults`, which names the column."""
    for name in damaged:
        if not _is_sound_cell(row.column(name)):
            raise DamagedError(f"the column {name!r} is damaged in this row")
    try:
        columns = _values(row)
    except faults() as error:
        raise DamagedError(_named(row, error)) from None
    return columns


def _values(batch: Any) -> dict[str, list[Any]]:
    """Returns the values by column; maps as dicts, tensors of one shape as arrays of numpy in
    their own order of axes. Raises one of `faults`, for a map with a key twice too."""
    tensor = library().FixedShapeTensorType
    columns = zip(batch.schema.names, batch.columns, strict=True)
    return {
        name: _arrays(column)
        if isinstance(column.type, tensor)
        else column.to_pylist(maps_as_pydicts="strict")
        for name, column in columns
    }


def _arrays(column: Any) -> list[Any]:
    cells = (column.slice(at, 1) for at in range(len(column)))
    return [None if cell.null_count else cell.to_numpy_ndarray()[0] for cell in cells]


def _named(row: Any, error: Exception) -> str:
    """Returns what is wrong with a row that cannot be converted, with its column."""
    reason = f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.to_pylist(maps_as_pydicts="strict")
        except faults():
            return f"the column {name!r} cannot be read in this row: {reason}"
    return f"the row cannot be read: {reason}"


def _damaged(batch: Any) -> list[str]:
    """Returns the columns in which some rows are damaged. Raises DamagedError where it cannot be
    told which."""
    found = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if _is_sound(column):
            continue
        if not _is_told_by_row(column.type) or batch.schema.names.count(name) > 1:
            raise DamagedError(f"the column {name!r} is damaged")
        found.append(name)
    return found


def _is_sound(column: Any) -> bool:
    """Returns whether every value of a column lies where it says."""
    try:
        column.validate(full=True)
    except no_memory():
        raise
    except faults():
        return False
    return True


def _is_sound_cell(cell: Any) -> bool:
    """Returns whether the one value of a slice lies where it says, whatever lies around it: of a
    nested type the library validates all values of all rows."""
    types = library("pyarrow.types")
    if not types.is_nested(cell.type):
        return _is_sound(cell)
    try:
        cell.validate()
        within = cell.flatten()
    except no_memory():
        raise
    except faults():
        return False
    arrays = within if types.is_struct(cell.type) else [within]
    return all(
        _is_sound(array) or all(_is_sound_cell(array.slice(at, 1)) for at in range(len(array)))
        for array in arrays
    )


def _is_told_by_row(kind: Any) -> bool:
    """Returns whether a slice of such a column can be looked at alone."""
    types = library("pyarrow.types")
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_map)
    if types.is_struct(kind) or any(is_kind(kind) for is_kind in lists):
        return all(_is_told_by_row(kind.field(at).type) for at in range(kind.num_fields))
    return not types.is_nested(kind) and not types.is_dictionary(kind)


def _known_zones(batch: Any) -> Any:
    """Returns the batch with times of zones that are unknown here in UTC, which are the same."""
    arrow, types = library(), library("pyarrow.types")
    for at, kind in enumerate(batch.schema.types):
        if not types.is_timestamp(kind) or kind.tz is None:
            continue
        try:
            arrow.lib.string_to_tzinfo(kind.tz)
        except Exception:  # pytz and zoneinfo raise anything
            utc = batch.column(at).view(arrow.timestamp(kind.unit, tz="UTC"))
            batch = batch.set_column(at, batch.schema.field(at).with_type(utc.type), utc)
    return batch
