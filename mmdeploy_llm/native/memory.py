"""Memory that costs little: weights in large pages, where the system has them, and no new pages for
every result.

Who reads weights from beginning to end spends a third of the time on the tables of 4 KiB pages. But
a virtual machine may need seconds for the first use of a gigabyte of large pages, so weights are
read into small ones, and a thread asks the system to move them while the first requests run.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PAGE_SIZE = 2 * 2**20  # of large pages on x86-64 and on most of aarch64
CHUNK_SIZE = 16 * PAGE_SIZE
LEAST_SIZE = 2**16  # bytes; what is smaller has ordinary memory
ALIGNMENT = 64
MADV_COLLAPSE = 25  # Linux 6.1: pages of this range become a large one now
MAX_REFUSALS = 8  # in a row: the system has none
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
LARGEST_KEPT = 32 * 2**20  # bytes; glibc takes no more
MOST_KEPT = 512 * 2**20


class LargePages:
    """Hands out tensors, one behind the other, from chunks that begin where a large page does; a
    chunk goes back to the system when the last tensor in it does."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._chunks: list[weakref.ref[mmap.mmap]] = []

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """As torch.empty, on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < LEAST_SIZE:
            return torch.empty(shape, dtype=dtype)
        if size > len(self._rest):
            self._rest = self._new_chunk(max(size, CHUNK_SIZE))
        own, self._rest = self._rest[:size], self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return own.view(dtype).view(shape)

    def settle(self) -> threading.Thread | None:
        """Has what was handed out moved to large pages by a thread, a page at a time, while others
        read and write it; None where the system has no such pages."""
        if not self._chunks or not _has_large_pages():
            return None
        chunks, self._chunks = self._chunks, []
        thread = threading.Thread(target=_move, args=(chunks,), name="large-pages", daemon=True)
        thread.start()
        return thread

    def _new_chunk(self, size: int) -> Tensor:
        """[size] bytes. The pages are there when they are used."""
        if not hasattr(mmap, "MAP_PRIVATE"):
            return torch.empty(size, dtype=torch.uint8)
        memory = mmap.mmap(-1, size + PAGE_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._chunks.append(weakref.ref(memory))
        first = -_address(memory) % PAGE_SIZE
        return torch.frombuffer(memory, dtype=torch.uint8)[first : first + size]


def _has_large_pages() -> bool:
    """Whether Linux may use them where it is asked to."""
    try:
        return "[never]" not in LARGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False


def _move(chunks: list[weakref.ref[mmap.mmap]]) -> None:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_moved = num_refused = 0
    for place in _places(chunks):
        if madvise(place, PAGE_SIZE, MADV_COLLAPSE) == 0:
            num_moved, num_refused = num_moved + 1, 0
        else:
            num_refused += 1
        if num_refused == MAX_REFUSALS:
            break
    logger.debug("%d MiB of weights are in large pages", num_moved * PAGE_SIZE // 2**20)


def _places(chunks: list[weakref.ref[mmap.mmap]]) -> Iterator[int]:
    """Where large pages belong in the chunks that are still there."""
    for chunk in chunks:
        memory = chunk()
        if memory is not None:
            begin = _address(memory)
            yield from range(begin + -begin % PAGE_SIZE, begin + len(memory) - PAGE_SIZE, PAGE_SIZE)
        del memory


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def keep_freed_memory() -> None:
    """From now on the C library keeps what is freed for the next allocation, up to half a gigabyte,
    where it can be told so (glibc): the results of a prefill are as large in the next one, and
    getting their pages from the system again costs a tenth of its time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
