"""Vectors of records as a column of an Arrow table: FixedSizeList<float32> where each item has one,
a list of these where each item has one for each of its tokens. Imports no library itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

EMBEDDING = "embedding"  # the name of the column
OURS = {b"mmdeploy_llm.vector": b"1"}  # its metadata: a corpus may carry a column of this name


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorKind:
    """The kind of the vectors of a table. size: numbers of each; None: not of all the same, such as
    those of two models in one output. is_many: whether an item has one for each token."""

    size: int | None
    is_many: bool

    @classmethod
    def of(cls, shape: Sequence[int]) -> VectorKind:
        """Returns the kind of one item's."""
        return cls(size=shape[-1], is_many=len(shape) == 2)

    def widened(self, other: VectorKind | None) -> VectorKind:
        """Returns the kind that holds both."""
        if other is None:
            return self
        size = self.size if self.size == other.size else None
        return VectorKind(size=size, is_many=self.is_many or other.is_many)


def field_of(arrow: ModuleType, kind: VectorKind) -> Any:
    """Returns the field of the column in a schema."""
    number = arrow.float32()
    one = arrow.list_(number) if kind.size is None else arrow.list_(number, kind.size)
    return arrow.field(EMBEDDING, arrow.list_(one) if kind.is_many else one, metadata=OURS)


def vectors_in(schema: Any) -> VectorKind | None:
    """Returns the kind of the vectors of an output's part, None without any."""
    at = schema.get_field_index(EMBEDDING)
    is_ours = at >= 0 and OURS.keys() <= (schema.field(at).metadata or {}).keys()
    return kind_in(schema.field(at).type) if is_ours else None


def kind_in(field_type: Any) -> VectorKind | None:
    """Returns the kind of a column's type, None of one that has no vectors."""
    outer = _size_in(field_type)
    if outer is None:
        return None
    inner = _size_in(field_type.value_type)
    if inner is not None and _is_number(field_type.value_type.value_type):
        return VectorKind(size=inner or None, is_many=True)
    if inner is None and _is_number(field_type.value_type):
        return VectorKind(size=outer or None, is_many=False)
    return None


def _size_in(field_type: Any) -> int | None:
    """Returns the size of a list's type, 0 where lists of it have sizes of their own; None of a
    type that is no list."""
    name = str(field_type)
    if name.startswith("fixed_size_list"):
        return int(field_type.list_size)
    return 0 if name.startswith(("list<", "large_list<")) else None


def _is_number(field_type: Any) -> bool:
    return str(field_type) in ("float", "double", "halffloat")


def column_of(arrow: ModuleType, arrays: Sequence[Floats | None], kind: VectorKind) -> Any:
    """Returns a column of the vectors of rows, null where a row has none."""
    import numpy as np

    missing = arrow.array([own is None for own in arrays], arrow.bool_())
    if kind.is_many:
        rows = [np.zeros((0, kind.size or 0), "f4") if own is None else own for own in arrays]
        rows = [own if own.ndim == 2 else own[None] for own in rows]
        inner = _lists(arrow, [row for own in rows for row in own], kind.size)
        ends = np.cumsum([0, *(len(own) for own in rows)], dtype="i4")
        return arrow.ListArray.from_arrays(arrow.array(ends), inner, mask=missing)
    blank = np.zeros(kind.size or 0, "f4")
    return _lists(arrow, [blank if own is None else own for own in arrays], kind.size, missing)


def _lists(arrow: ModuleType, rows: Sequence[Floats], size: int | None, missing: Any = None) -> Any:
    """Returns a list for each row."""
    import numpy as np

    flat = arrow.array(np.concatenate(rows) if rows else np.zeros(0, "f4"), arrow.float32())
    if size is not None:
        return arrow.FixedSizeListArray.from_arrays(flat, size, mask=missing)
    ends = np.cumsum([0, *(len(own) for own in rows)], dtype="i4")
    return arrow.ListArray.from_arrays(arrow.array(ends), flat, mask=missing)


def arrays_of(column: Any) -> list[Floats | None]:
    """Returns the vectors of the rows of an array or chunked array, None where a row has none.
    Raises ConfigError for rows of token vectors that are not all of one size."""
    chunks = column.chunks if hasattr(column, "chunks") else [column]
    return [own for chunk in chunks for own in _of_chunk(chunk)]


def _of_chunk(chunk: Any) -> list[Floats | None]:
    import numpy as np

    known = chunk.drop_null()
    lists, lengths = known.flatten(), _lengths(known)
    if _size_in(lists.type) is not None:
        sizes = _lengths(lists)
        if len(sizes) and (sizes.min() != sizes.max() or lists.null_count):
            raise ConfigError("the vectors of its tokens are not all of one size")
        size = int(sizes[0]) if len(sizes) else 0
        flat = lists.flatten().to_numpy(zero_copy_only=False).astype("f4", copy=False)
        flat = flat.reshape(len(lists), size)
    else:
        flat = lists.to_numpy(zero_copy_only=False).astype("f4", copy=False)
    ends = np.cumsum(lengths)
    found = iter(np.split(flat, ends[:-1]) if len(ends) else [])
    return [next(found) if is_valid else None for is_valid in chunk.is_valid().to_pylist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The vectors of some rows. is_valid: which rows have any. values: [sum of lengths, size], of
    these rows only. lengths: vectors of each of these; None: one of each."""

    is_valid: NDArray[np.bool_]
    values: Floats
    lengths: NDArray[np.int64] | None = None


def matrix_of(column: Any) -> Matrix:
    """Returns the vectors of an array as one matrix. Raises ConfigError where they are not all of
    one size."""
    known = column.drop_null()
    lists, lengths = known, None
    if _size_in(known.type.value_type) is not None:
        lists, lengths = known.flatten(), _lengths(known)
        if lists.null_count:
            raise ConfigError("a token has no vector")
    sizes = _lengths(lists)
    if len(sizes) and sizes.min() != sizes.max():
        raise ConfigError(f"vectors have {sizes.min()} numbers and {sizes.max()} numbers")
    flat = lists.flatten().to_numpy(zero_copy_only=False).astype("f4", copy=False)
    values = flat.reshape(len(lists), int(sizes[0]) if len(sizes) else 0)
    is_valid = column.is_valid().to_numpy(zero_copy_only=False)
    return Matrix(is_valid=is_valid, values=values, lengths=lengths)


def _lengths(lists: Any) -> NDArray[np.int64]:
    """Returns the lengths of lists, none of which is null."""
    import numpy as np

    if _size_in(lists.type):
        return np.full(len(lists), lists.type.list_size, "i8")
    return np.asarray(lists.value_lengths().to_numpy(zero_copy_only=False), "i8")
