"""Records kernel calls once and replays them in one call into the library: a decode step of a small
model otherwise spends a fifth of its time between its kernels.

    function(inputs) --record--> calls with their arguments, memory at fixed addresses --> run

A recorded function may call kernels, and view their results in other shapes. Any other operation of
torch would be missing from the recording: it is detected, and nothing is recorded.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

# The functions that mm_run of kernels.cpp can call, in its order.
RECORDABLE = (
    "mm_rms_norm",
    "mm_norm_heads",
    "mm_silu_mul",
    "mm_rotate",
    "mm_attend",
    "mm_write_cache",
    "mm_linear_bf16",
    "mm_linear_s8",
    "mm_linear_f32",
    "mm_look_up",
    "mm_angles",
    "mm_linear_codes",
    "mm_short_conv",
    "mm_delta_rule",
    "mm_take_columns",
    "mm_gate_heads",
    "mm_look_up_codes",
)
# Functions of torch that return facts about a tensor, or a view of it. `reshape` and `flatten` may
# copy: the memory of their result shows whether they did.
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
NUM_ARGUMENTS = 14
# Index of the weights, and of k.
PACKED = {"mm_linear_bf16": 2, "mm_linear_s8": 3, "mm_linear_f32": 2, "mm_linear_codes": 3}
K = {"mm_linear_bf16": 7, "mm_linear_s8": 9, "mm_linear_f32": 7, "mm_linear_codes": 10}
BITS_PER_VALUE = {"mm_linear_bf16": 16, "mm_linear_s8": 8, "mm_linear_f32": 32}
CODE_BITS = 15  # of the first argument of mm_linear_codes
ALIGNMENT = 64


class Recording:
    """The recorded kernel calls of one function of tensors; see kernels.Recording."""

    def __init__(
        self,
        run: Callable[[int, int], None],
        calls: NDArray[np.int64],
        inputs: Sequence[Tensor],
        out: Tensor,
        kept: Sequence[object],
    ) -> None:
        """run: mm_run of the library.
        calls: [C, 1 + NUM_ARGUMENTS], index of the function and its arguments.
        inputs, out: the tensors that the calls read and write.
        kept: structures that the calls point to, kept alive here.
        """
        self._run = run
        self._calls = calls
        self._inputs = inputs
        self._out = out
        self._kept = kept

    def run(self, *inputs: Tensor) -> Tensor:
        """Returns function(*inputs). The next run of any recording of the same kernels overwrites
        the result."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._run(self._calls.ctypes.data, len(self._calls))
        return self._out


class Memory:
    """Memory for the results of recorded calls. A block is reused once nothing refers to its tensor
    any more. Recordings share the memory, since they run one after the other."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocates as torch.empty does."""
        size = int(np.prod(shape)) * dtype.itemsize
        block_size = max(ALIGNMENT, 1 << (size - 1).bit_length())
        free = self._free[block_size]
        block = free.pop() if free else _aligned(block_size)
        own = block[:size]
        # The tensor's memory refers to `own`, and so do all of its views.
        weakref.finalize(own, free.append, block).atexit = False
        return torch.from_numpy(own).view(dtype).view(tuple(shape))


class Recorder:
    """Stands in for the library while a function is recorded: forwards the calls and stores those
    of its thread. Others, which prepare media meanwhile, have no part in the function."""

    def __init__(self, library: ctypes.CDLL, memory: Memory) -> None:
        self._library = library
        self._memory = memory
        self._calls: list[tuple[str, tuple[int, ...]]] = []
        self._kept: list[object] = []  # structures that arguments point to
        self._is_complete = True
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Callable[..., None]:
        function: Callable[..., None] = getattr(self._library, name)
        if threading.get_ident() != self._thread:
            return function

        def call(*arguments: Any) -> None:
            function(*arguments)
            if name in RECORDABLE:
                self._calls.append((name, tuple(self._as_int(value) for value in arguments)))
            else:
                self._is_complete = False

        return call

    def record(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Recording | None]:
        """Returns function(*inputs) and its recording; None where it cannot be recorded."""
        own = [self._memory.empty(x.shape, dtype=x.dtype).copy_(x) for x in inputs]
        with _Watch() as watch:
            out = function(*own)
        if not self._is_complete or watch.unknown is not None:
            return out, None
        calls = np.zeros((len(self._calls), 1 + NUM_ARGUMENTS), dtype=np.int64)
        for row, (name, arguments) in zip(calls, self._with_prefetch(), strict=True):
            row[0] = RECORDABLE.index(name)
            row[1 : 1 + len(arguments)] = arguments
        return out, Recording(self._library.mm_run, calls, own, out, self._kept)

    def _as_int(self, value: Any) -> int:
        """Converts an argument to the integer that mm_run expects."""
        if isinstance(value, float):
            return int(np.float32(value).view(np.int32))
        if isinstance(value, ctypes.Structure):
            self._kept.append(value)
            return ctypes.addressof(value)
        return int(value or 0)

    def _with_prefetch(self) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the calls. Those of linear layers get the address and the bytes per row of the
        next linear layer's weights, which they prefetch."""
        following: tuple[int, int] = (0, 0)
        done = []
        for name, arguments in reversed(self._calls):
            if name in PACKED:
                done.append((name, (*arguments[:-2], *following)))
                bits = BITS_PER_VALUE.get(name, arguments[0] & CODE_BITS)
                following = arguments[PACKED[name]], arguments[K[name]] * bits // 8
            else:
                done.append((name, arguments))
        return done[::-1]


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
