"""Memory of weights, in large pages where the system has them.

Reading all weights from 4 KiB pages spends a third of the time on page tables. But a virtual
machine may need seconds to touch a gigabyte of large pages for the first time, so weights are
loaded into small pages, and a thread has the system move them to large ones while the first
requests run.

Weights that the memory does not hold are loaded into pages of files.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from mmdeploy_llm.system.portable.files import reserve
from mmdeploy_llm.system.portable.libraries import c_library

logger = logging.getLogger(__name__)

PAGE_SIZE = 2 * 2**20  # large pages of x86-64 and most of aarch64
CHUNK_SIZE = 16 * PAGE_SIZE
FILE_SIZE = 2**28  # bytes of a file, which takes that room at once
MIN_SIZE = 2**16  # bytes; smaller tensors get ordinary memory
ALIGNMENT = 64
_REMOVE = getattr(mmap, "MADV_REMOVE", getattr(mmap, "MADV_DONTNEED", 0))  # Linux has the first
MADV_COLLAPSE = 25  # Linux 6.1: merges a range of small pages into a large one at once
MAX_REFUSALS = 8  # in a row, after which the system is assumed to have no large pages left
LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class LargePages:
    """Allocates tensors one after the other from chunks that are aligned to large pages. A chunk is
    unmapped when its last tensor is freed."""

    has_files = hasattr(mmap, "MAP_PRIVATE")  # whether it can allocate pages of files

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)
        self._chunks: list[weakref.ref[mmap.mmap]] = []
        self._files: list[weakref.ref[mmap.mmap]] = []
        self._folder: Path | None = None

    @contextmanager
    def in_files(self, folder: Path) -> Iterator[None]:
        """Allocates pages of files in `folder` meanwhile, which have no names: a file is gone with
        its last tensor, and with the process. Where `has_files` is False nothing changes."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._rest, self._folder = nothing, folder
        try:
            yield
        finally:
            self._rest, self._folder = nothing, None

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """Allocates as torch.empty does, on the CPU."""
        size = math.prod(shape) * dtype.itemsize
        if size < MIN_SIZE:
            return torch.empty(shape, dtype=dtype)
        if size > len(self._rest):
            self._rest = self._new_chunk(max(size, CHUNK_SIZE))
        own, self._rest = self._rest[:size], self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return own.view(dtype).view(shape)

    def release(self, tensor: Tensor) -> bool:
        """Gives the whole pages of `tensor`, contiguous, back to the system where a chunk holds
        them: its values, which nobody needs any more, become undefined. Returns whether there were
        any. Before `settle`."""
        begin = tensor.data_ptr()
        first, end = begin + -begin % mmap.PAGESIZE, begin + tensor.nbytes
        for chunk in (*self._chunks, *self._files):
            memory = chunk()
            if memory is None or not 0 <= begin - _address(memory) < len(memory):
                continue
            if first + mmap.PAGESIZE > end:
                return False
            advice = _REMOVE if chunk in self._files else mmap.MADV_DONTNEED
            size = (end - first) // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):  # of a file system that keeps what was written
                memory.madvise(advice, first - _address(memory), size)
                return True
        return False

    def settle(self) -> threading.Thread | None:
        """Starts a thread that moves all chunks allocated so far to large pages, page by page,
        while other threads read and write them; None if the system has no such pages."""
        if not self._chunks or not _has_large_pages():
            return None
        chunks, self._chunks = self._chunks, []
        thread = threading.Thread(target=_move, args=(chunks,), name="large-pages", daemon=True)
        thread.start()
        return thread

    def _new_chunk(self, size: int) -> Tensor:
        """Maps `size` bytes; the system provides their pages when they are first used."""
        if not self.has_files:
            return torch.empty(size, dtype=torch.uint8)
        memory = None if self._folder is None else self._file_pages(max(size, FILE_SIZE))
        if memory is None:
            memory = mmap.mmap(-1, size + PAGE_SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._chunks.append(weakref.ref(memory))
        size = len(memory) - PAGE_SIZE
        first = -_address(memory) % PAGE_SIZE
        return torch.frombuffer(memory, dtype=torch.uint8)[first : first + size]

    def _file_pages(self, size: int) -> mmap.mmap | None:
        """Maps a new file; None, with a warning, where the folder takes none."""
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                reserve(file.fileno(), size + PAGE_SIZE)
                memory = mmap.mmap(file.fileno(), size + PAGE_SIZE)
        except OSError as error:
            logger.warning("%s takes no file for weights: memory does (%s)", self._folder, error)
            self._folder = None
            return None
        self._files.append(weakref.ref(memory))
        return memory


def _has_large_pages() -> bool:
    """Whether Linux allows large pages on request."""
    try:
        return "[never]" not in LARGE_PAGES.read_text(encoding="ascii")
    except OSError:
        return False


def _move(chunks: list[weakref.ref[mmap.mmap]]) -> None:
    library = c_library()
    if library is None:
        return
    madvise = library.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_moved = num_refused = 0
    for address in _page_addresses(chunks):
        if madvise(address, PAGE_SIZE, MADV_COLLAPSE) == 0:
            num_moved, num_refused = num_moved + 1, 0
        else:
            num_refused += 1
        if num_refused == MAX_REFUSALS:
            break
    logger.debug("%d MiB of weights are in large pages", num_moved * PAGE_SIZE // 2**20)


def _page_addresses(chunks: list[weakref.ref[mmap.mmap]]) -> Iterator[int]:
    """Yields the addresses of large pages in the chunks that are still mapped."""
    for chunk in chunks:
        memory = chunk()
        if memory is not None:
            begin = _address(memory)
            yield from range(begin + -begin % PAGE_SIZE, begin + len(memory) - PAGE_SIZE, PAGE_SIZE)
        del memory


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
