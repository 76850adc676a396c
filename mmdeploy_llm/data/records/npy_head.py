"""Reads the headers of .npy files: those of arrays that users bring to `search`, and of outputs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

MAX_SHOWN = 200  # characters of a message of numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyHead:
    """The header of a .npy file. shape: of the array. begin: where it begins, in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int

    @property
    def end(self) -> int:
        """The position after the array."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


def read_npy_head(file: IO[bytes], name: str) -> NpyHead:
    """Reads the header of a .npy file, which stands at its begin. Raises ConfigError for a file
    that is none, whose array is in Fortran's order or has objects, and for one that is cut off."""
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"its version of .npy, {version}, is not known")
        shape, is_fortran, dtype = readers[version](file)
    except Exception as error:  # numpy reads it as Python's text, and raises whatever that does
        words = str(error)[:MAX_SHOWN] or type(error).__name__
        raise ConfigError(f"{name!r} is not a .npy file: {words}") from None
    if not all(type(own) is int and own >= 0 for own in shape):
        raise ConfigError(f"{name!r} is not a .npy file: its shape is {str(shape)[:MAX_SHOWN]}")
    if is_fortran or dtype.hasobject:
        words = "is stored column by column" if is_fortran else "has Python objects"
        raise ConfigError(
            f"{name!r}: its array {words}; save it with numpy.save(name, "
            "numpy.ascontiguousarray(vectors, 'float32'))"
        )
    head = NpyHead(shape=shape, dtype=dtype, begin=file.tell())
    size = file.seek(0, os.SEEK_END)
    if size < head.end:
        raise ConfigError(
            f"{name!r} is cut off: it has {size} bytes, and its array ends at {head.end}; copy it "
            "again, or have it written again"
        )
    return head
