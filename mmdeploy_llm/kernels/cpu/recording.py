"""Records kernel calls once and replays them in one call into the library: a decode step of a small
model otherwise spends a fifth of its time between its kernels.

    function(inputs) --record--> calls with their arguments, memory at fixed addresses --> run

The threads of a replay stay together until its last loop; see crew.h.

A recorded function may call kernels, and view their results in other shapes. Any other operation of
torch would be missing from the recording: it is detected, and nothing is recorded.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .calls import THREADS, Call, Calls

# Functions of torch that return a tensor's size or place, or a view of it. `reshape` and `flatten`
# may copy: the memory of their result shows whether they did.
VIEWS = {
    "__get__",
    "__getitem__",
    "__len__",
    "chunk",
    "data_ptr",
    "dim",
    "flatten",
    "is_contiguous",
    "numel",
    "reshape",
    "size",
    "split",
    "stride",
    "transpose",
    "unsqueeze",
    "view",
}
ALIGNMENT = 64


class Recording:
    """The recorded kernel calls of one function of tensors; see Kernels.record."""

    def __init__(
        self,
        run: Callable[[int, int, int], None],
        calls: Sequence[tuple[Call, Structure]],
        inputs: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        """run: mm_run of the library.
        calls: each with its arguments, which stay where they are.
        inputs, out: the tensors that the calls read and write.
        """
        pairs = [(call.address, ctypes.addressof(args)) for call, args in calls]
        self._run = run
        self._pairs = np.array(pairs, dtype=np.int64).reshape(-1, 2)  # as Call of kernels.cpp
        self._args = [args for _, args in calls]  # kept alive
        self._num_threads = max((getattr(args, THREADS, 1) for args in self._args), default=1)
        self._inputs = inputs
        self._out = out

    def run(self, *inputs: Tensor) -> Tensor:
        """Returns function(*inputs). The next run of any recording of the same kernels overwrites
        the result."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._run(self._pairs.ctypes.data, len(self._pairs), self._num_threads)
        return self._out


class Memory:
    """Memory for the results of recorded calls. A block is reused once nothing refers to its tensor
    any more. Recordings share the memory, since they run one after the other."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._lent: dict[int, _Lent] = {}  # by id

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocates as torch.empty does."""
        size = int(np.prod(shape)) * dtype.itemsize
        block_size = max(ALIGNMENT, 1 << (size - 1).bit_length())
        free = self._free[block_size]
        block = free.pop() if free else _aligned(block_size)
        own = block[:size]
        # The tensor's memory refers to `own`, and so do all of its views.
        lent = _Lent(own, _take_back)
        lent.block, lent.memory = block, weakref.ref(self)
        self._lent[id(lent)] = lent
        return torch.from_numpy(own).view(dtype).view(tuple(shape))

    def take_back(self, lent: _Lent) -> None:
        """Keeps the block of a tensor that is gone."""
        del self._lent[id(lent)]
        self._free[len(lent.block)].append(lent.block)


class _Lent(weakref.ref[NDArray[np.uint8]]):
    """Refers to the memory of a tensor, whose block its callback gives back. It is no
    weakref.finalize for the reason that system.processes.finalize_here gives."""

    __slots__ = ("block", "memory")
    block: NDArray[np.uint8]
    memory: weakref.ref[Memory]


def _take_back(lent: weakref.ref[NDArray[np.uint8]]) -> None:
    assert isinstance(lent, _Lent)
    memory = lent.memory()
    if memory is not None:
        memory.take_back(lent)


class Recorder:
    """Stands in for the library while a function is recorded: forwards the calls and stores those
    of its own thread. Other threads may prepare media meanwhile."""

    def __init__(
        self, library: Calls, run: Callable[[int, int, int], None], memory: Memory
    ) -> None:
        """run: mm_run of the library."""
        self._library = library
        self._run = run
        self._memory = memory
        self._calls: list[tuple[Call, Structure]] = []
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = self._library.by_name[name]
        if threading.get_ident() != self._thread:
            return call.run

        def recorded(**fields: Any) -> None:
            self._calls.append((call, call.args.from_buffer_copy(call.run(**fields))))

        return recorded

    def record(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Recording | None]:
        """Returns function(*inputs) and its recording; None where it did more than call kernels."""
        own = [self._memory.empty(x.shape, dtype=x.dtype).copy_(x) for x in inputs]
        with _Watch() as watch:
            out = function(*own)
        if watch.unknown is not None:
            return out, None
        prefetch_next([args for _, args in self._calls])
        return out, Recording(self._run, self._calls, own, out)


class Capture:
    """Stands in for the library, and keeps the calls of its own thread instead of making them.
    found: their names and arguments."""

    def __init__(self, library: Calls) -> None:
        self._library = library
        self.found: list[tuple[str, Structure]] = []
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = self._library.by_name[name]
        if threading.get_ident() != self._thread:
            return call.run

        def kept(**fields: Any) -> None:
            self.found.append((name, call.args.from_buffer_copy(call.pack(**fields))))

        return kept


def prefetch_next(calls: Sequence[Any]) -> None:
    """Tells each product which weights the next one reads, so that it prefetches them."""
    products = [args for args in calls if hasattr(args, "next_packed")]
    for args, following in pairwise(products):
        args.next_packed, args.next_row_bytes = following.packed, following.row_bytes


class _Watch(TorchFunctionMode):
    """Detects operations of torch other than views. unknown: the name of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.unknown: str | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else (result,)
        storages = {_storage(x) for x in args if isinstance(x, Tensor)}
        is_view = all(_storage(x) in storages for x in results if isinstance(x, Tensor))
        name = getattr(func, "__name__", str(func))
        if name not in VIEWS or not is_view:
            self.unknown = self.unknown or name
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]
