"""A file of tensors that is used only if it is whole.

    MAGIC | size of header | header: JSON | tensors, each at a multiple of a page | digest | MAGIC

The digest is that of the file's name, the header, and the sum of each page as 64-bit integers,
which takes no longer than reading the memory once.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import platform
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.kernels.cpu import LargePages
from mmdeploy_llm.system.portable.files import read_into
from mmdeploy_llm.system.portable.machine import free_ram

from .record import NotKeptError, Record

MAGIC = b"mmdeploy_llm weights 2\n"
PAGE = 4096
DIGEST_SIZE = 32
FOOTER_SIZE = DIGEST_SIZE + len(MAGIC)
HEAD_SIZE = len(MAGIC) + 8
SLICE = 2**24  # bytes that are written or summed at once
NUM_THREADS = 2
# The first Linux whose ext4 keeps files in large pages. Products with weights in small ones take
# up to a third longer.
LARGE_FILE_PAGES = (6, 16)

Sums = NDArray[np.int64]


def planned_size(tensors: Sequence[Tensor]) -> int:
    """Returns about how many bytes a file of these tensors has."""
    return sum(_padded(tensor.nbytes) for tensor in tensors) + PAGE


def write(
    file: IO[bytes],
    name: str,
    kept: Record,
    is_stopped: Callable[[], bool],
    release: Callable[[Tensor], object] | None = None,
) -> None:
    """Writes a record. name: of the file, once it is whole. release: is given each tensor that was
    written and shares its memory with no other. Raises NotKeptError where it was stopped."""
    header = _header(kept)
    file.write(header)
    digest = hashlib.blake2b(name.encode() + b"\0" + header, digest_size=DIGEST_SIZE)
    shared = _shared(kept.tensors)
    for number, tensor in enumerate(kept.tensors):
        for piece in _pieces(tensor):
            if is_stopped():
                raise NotKeptError("the program ended first")
            file.write(piece.data)
            digest.update(_sums(piece).tobytes())
        if release is not None and number not in shared:
            release(tensor)
    file.write(digest.digest() + MAGIC)


def _header(kept: Record) -> bytes:
    """Returns the file's beginning, a whole number of pages. Places of tensors count from its
    end."""
    place, tensors = 0, []
    for tensor in kept.tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        tensors.append({"dtype": name, "shape": list(tensor.shape), "place": place})
        place += _padded(tensor.nbytes)
    text = json.dumps({"size": place, "tensors": tensors, **kept.values}).encode()
    text += b" " * (-(HEAD_SIZE + len(text)) % PAGE)
    return MAGIC + len(text).to_bytes(8, sys.byteorder) + text


def _shared(tensors: Sequence[Tensor]) -> Set[int]:
    """Returns the numbers of tensors that cannot be given back alone: views of memory that others
    have too, and those that are not contiguous."""
    found = {number for number, tensor in enumerate(tensors) if not tensor.is_contiguous()}
    furthest, end = -1, 0  # of the tensors so far, the one that reaches furthest
    for number in sorted(range(len(tensors)), key=lambda each: tensors[each].data_ptr()):
        tensor = tensors[number]
        first, reach = tensor.data_ptr(), 0
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = 1 + sum((size - 1) * step for size, step in steps)
        if first < end:
            found |= {furthest, number}
        if first + reach * tensor.itemsize > end:
            furthest, end = number, first + reach * tensor.itemsize
    return found


def _padded(size: int) -> int:
    return size + -size % PAGE


def _pieces(tensor: Tensor) -> Iterator[NDArray[np.uint8]]:
    """Yields the bytes of a tensor, whole pages: the last one ends in zeros."""
    values = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for first in range(0, len(values), SLICE):
        piece = values[first : first + SLICE]
        yield np.pad(piece, (0, -len(piece) % PAGE)) if len(piece) % PAGE else piece


def _sums(data: NDArray[np.uint8]) -> Sums:
    sums: Sums = data.view(np.int64).reshape(-1, PAGE // 8).sum(1)
    return sums


def read(file: IO[bytes], size: int, name: str, memory: LargePages | None) -> Record:
    """Reads a file as `write` wrote it under this name, of `size` bytes, into `memory`; None: its
    tensors are pages of the file, copied when they are written. Raises NotKeptError for a file that
    is not whole."""
    if size < HEAD_SIZE + FOOTER_SIZE:
        raise NotKeptError("it ends early")
    if memory is None:
        whole = _mapped(file, size)
    else:
        whole = _read_whole(file, memory.empty((size,), dtype=torch.uint8))
    data: NDArray[np.uint8] = whole.numpy()
    begin = HEAD_SIZE + int.from_bytes(data[len(MAGIC) : HEAD_SIZE].tobytes(), sys.byteorder)
    end = size - FOOTER_SIZE
    if data[: len(MAGIC)].tobytes() != MAGIC or begin > end or (end - begin) % PAGE or begin % PAGE:
        raise NotKeptError("it is not whole")
    header, pages = data[:begin].tobytes(), data[begin:end]
    digest = hashlib.blake2b(name.encode() + b"\0" + header, digest_size=DIGEST_SIZE)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights") as pool:
        parts = (pages[first : first + SLICE] for first in range(0, len(pages), SLICE))
        for sums in pool.map(_sums, parts):
            digest.update(sums.tobytes())
    if data[end:].tobytes() != digest.digest() + MAGIC:
        raise NotKeptError("its digest is another")
    values = json.loads(header[HEAD_SIZE:])
    tensors = [_tensor(whole[begin:end], **own) for own in values["tensors"]]
    return Record(tensors=tensors, values=values)


def stays_in_file(size: int) -> bool:
    """Whether weights of so many bytes are best used as pages of their file: where the system keeps
    these large, and where the memory does not hold them, so that it takes some back and reads them
    again when they are used, such as those of experts that few tokens need."""
    return keeps_large_pages() or size > free_ram()


def keeps_large_pages() -> bool:
    """Whether this system keeps the files that it has read in large pages of memory."""
    found = platform.release().split(".")[:2]
    numbers = tuple(int(part) for part in found if part.isdecimal())
    return sys.platform == "linux" and len(numbers) == 2 and numbers >= LARGE_FILE_PAGES


def _mapped(file: IO[bytes], size: int) -> Tensor:
    memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _read_whole(file: IO[bytes], whole: Tensor) -> Tensor:
    def read_part(first: int) -> None:
        view = whole[first : first + SLICE].numpy().data
        while view:
            count = read_into(file.fileno(), view, first)
            if not count:
                raise NotKeptError("it ends early")
            view, first = view[count:], first + count

    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights") as pool:
        list(pool.map(read_part, range(0, len(whole), SLICE)))
    return whole


def _tensor(data: Tensor, *, dtype: str, shape: Sequence[int], place: int) -> Tensor:
    kind: Any = getattr(torch, dtype)
    size = math.prod(shape) * kind.itemsize
    return (
        data[place : place + size].view(kind).view(shape)
        if size
        else torch.empty(shape, dtype=kind)
    )
