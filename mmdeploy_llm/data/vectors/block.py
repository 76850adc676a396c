"""Block: the vectors of some items that follow each other in a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Numbers = NDArray[np.int64]

BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """Some items that have vectors. numbers: of the items, rising. rows: of their vectors, [rows,
    size]. lengths: rows of each item, none of them 0; None: one of each."""

    numbers: Numbers
    rows: Floats
    lengths: Numbers | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def squares(self) -> Floats:
        """The squared length of each row, inf where float32 does not hold it."""
        import numpy as np

        with np.errstate(over="ignore", invalid="ignore"):
            found: Floats = np.einsum("ij,ij->i", self.rows, self.rows)
        return found

    @property
    def starts(self) -> Numbers:
        """The first row of each item."""
        import numpy as np

        if self.lengths is None:
            return np.arange(len(self.numbers))
        return np.cumsum(self.lengths) - self.lengths

    def chosen(self, keep: NDArray[np.bool_]) -> Block:
        """Returns the block with some of its items."""
        if keep.all():
            return self
        if self.lengths is None:
            return Block(numbers=self.numbers[keep], rows=self.rows[keep])
        import numpy as np

        rows = self.rows[np.repeat(keep, self.lengths)]
        return Block(numbers=self.numbers[keep], rows=rows, lengths=self.lengths[keep])

    def is_finite(self) -> NDArray[np.bool_]:
        """Returns of each item whether all its numbers are finite."""
        import numpy as np

        if np.isfinite(self.squares).all():
            return np.ones(len(self), "?")
        fine: NDArray[np.bool_] = np.asarray(np.isfinite(self.rows).all(axis=1))
        if self.lengths is None or not len(self):
            return fine
        found: NDArray[np.bool_] = np.logical_and.reduceat(fine, self.starts)
        return found

    def pieces(self, num_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yields blocks of at most about this size."""
        most = max(1, num_bytes // max(1, self.rows.itemsize * self.rows.shape[1]))
        if self.lengths is None:
            for begin in range(0, len(self), most):
                part = slice(begin, begin + most)
                yield Block(numbers=self.numbers[part], rows=self.rows[part])
            return
        starts, begin = self.starts, 0
        while begin < len(self):
            end = begin + 1
            while end < len(self) and starts[end] + self.lengths[end] - starts[begin] <= most:
                end += 1
            last = starts[end - 1] + self.lengths[end - 1]
            yield Block(
                numbers=self.numbers[begin:end],
                rows=self.rows[starts[begin] : last],
                lengths=self.lengths[begin:end],
            )
            begin = end


def unit(block: Block) -> Block:
    """Returns the block with rows of length 1; rows of zeros stay."""
    return Block(numbers=block.numbers, rows=normalized(block.rows), lengths=block.lengths)


def normalized(rows: Floats) -> Floats:
    """Returns the rows with length 1; a row of zeros stays."""
    import numpy as np

    scale = np.abs(rows).max(axis=1, keepdims=True, initial=0)
    scaled = rows / np.where(scale == 0, 1, scale)  # its squares are neither too large nor 0
    length = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]
    return np.asarray(scaled / np.where(length == 0, 1, length), "f4")
