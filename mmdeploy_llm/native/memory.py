"""Memory that costs little: weights in large pages, where the system has them (who reads them from
beginning to end spends a third of the time on the tables of 4 KiB pages otherwise), and no new
pages for every result."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os

import torch
from torch import Tensor

PAGE_SIZE = 2 * 2**20  # of large pages on x86-64 and on most of aarch64
CHUNK_SIZE = 16 * PAGE_SIZE
LEAST_SIZE = 2**16  # bytes; what is smaller has ordinary memory
ALIGNMENT = 64
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
LARGEST_KEPT = 32 * 2**20  # bytes; glibc takes no more
MOST_KEPT = 512 * 2**20


class LargePages:
    """Hands out tensors, one behind the other, from chunks of large pages; a chunk goes back to the
    system when the last tensor in it does."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """As torch.empty, on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_SIZE:
            return torch.empty(shape, dtype=dtype)
        if size > len(self._rest):
            self._rest = _chunk(max(size, CHUNK_SIZE))
        own, self._rest = self._rest[:size], self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return own.view(dtype).view(shape)


def _chunk(size: int) -> Tensor:
    """[size] bytes that begin where a large page does. The pages are there when they are used."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + PAGE_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    first = -chunk.data_ptr() % PAGE_SIZE
    return chunk[first : first + size]


def keep_freed_memory() -> None:
    """From now on the C library keeps what is freed for the next allocation, up to half a gigabyte,
    where it can be told so (glibc): the results of a prefill are as large in the next one, and
    getting their pages from the system again costs a tenth of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
