"""Kernel calls, recorded once and made again in one call into the library: a decode step of a small
model otherwise spends a fifth of its time between its kernels.

    function(inputs) --watched--> calls with their arguments, memory that stays in place --> run

What a function may do: call kernels, and look at their results in other shapes. Any other operation
of torch would be missing from the recording; it is noticed, and there is no recording then.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

# As in kernels.cpp; and where, among a linear layer's arguments, its weights are and its k.
RECORDABLE = (
    "mm_rms_norm",
    "mm_norm_heads",
    "mm_silu_mul",
    "mm_rotate",
    "mm_attend",
    "mm_write_cache",
    "mm_linear_bf16",
    "mm_linear_s8",
)
# Functions of torch that give what a tensor is, or the same memory in another shape. `reshape` and
# its like copy where they must; their results are looked at.
LOOKS = {
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
BYTES_PER_VALUE = {"mm_linear_bf16": 2, "mm_linear_s8": 1}
PACKED = {"mm_linear_bf16": 2, "mm_linear_s8": 3}
K = {"mm_linear_bf16": 7, "mm_linear_s8": 9}
ALIGNMENT = 64


class Recording:
    """The calls of one function of tensors."""

    def __init__(
        self,
        run: Callable[[int, int], None],
        calls: NDArray[np.int64],
        inputs: Sequence[Tensor],
        out: Tensor,
        kept: Sequence[object],
    ) -> None:
        """run: mm_run. calls: [C, 1 + 14]. inputs, out: where the function read and left its
        values. kept: what the calls point to beside tensors that others keep."""
        self._run = run
        self._calls = calls
        self._inputs = inputs
        self._out = out
        self._kept = kept

    def run(self, *inputs: Tensor) -> Tensor:
        """function(*inputs). The result is overwritten by the next run of any recording of the same
        kernels."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._run(self._calls.ctypes.data, len(self._calls))
        return self._out


class Memory:
    """Memory for what recorded calls write: a tensor has it until nothing refers to it any more,
    then the next one. Recordings share it, since they run one at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """As torch.empty."""
        size = int(np.prod(shape)) * dtype.itemsize
        block_size = max(ALIGNMENT, 1 << (size - 1).bit_length())
        free = self._free[block_size]
        block = free.pop() if free else _aligned(block_size)
        part = block[:size]
        # The tensor's memory refers to `part`, and so do all that look at it in other shapes.
        weakref.finalize(part, free.append, block).atexit = False
        return torch.from_numpy(part).view(dtype).view(tuple(shape))


class Recorder:
    """Stands in for the library while a function is recorded: makes the calls and notes them."""

    def __init__(self, library: ctypes.CDLL, memory: Memory) -> None:
        self._library = library
        self._memory = memory
        self._calls: list[tuple[str, tuple[int, ...]]] = []
        self._kept: list[object] = []  # what arguments point to
        self._is_complete = True

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> None:
            function(*arguments)
            if name in RECORDABLE:
                self._calls.append((name, tuple(self._number(value) for value in arguments)))
            else:
                self._is_complete = False

        return call

    def record(
        self, function: Callable[..., Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Recording | None]:
        """function(*inputs), and how to have it again; None where that cannot be recorded."""
        own = [self._memory.empty(x.shape, dtype=x.dtype).copy_(x) for x in inputs]
        with _Watch() as watch:
            out = function(*own)
        if not self._is_complete or watch.unknown is not None:
            return out, None
        calls = np.zeros((len(self._calls), 1 + NUM_ARGUMENTS), dtype=np.int64)
        for row, (name, arguments) in zip(calls, self._with_next(), strict=True):
            row[0] = RECORDABLE.index(name)
            row[1 : 1 + len(arguments)] = arguments
        return out, Recording(self._library.mm_run, calls, own, out, self._kept)

    def _number(self, value: Any) -> int:
        if isinstance(value, float):
            return int(np.float32(value).view(np.int32))
        if isinstance(value, ctypes.Structure):
            self._kept.append(value)
            return ctypes.addressof(value)
        return int(value or 0)

    def _with_next(self) -> list[tuple[str, tuple[int, ...]]]:
        """The calls; those of linear layers know the weights of the next one."""
        following: tuple[int, int] = (0, 0)
        done = []
        for name, arguments in reversed(self._calls):
            if name in PACKED:
                done.append((name, (*arguments[:-2], *following)))
                following = arguments[PACKED[name]], arguments[K[name]] * BYTES_PER_VALUE[name]
            else:
                done.append((name, arguments))
        return done[::-1]


class _Watch(TorchFunctionMode):
    """Notes whether torch did anything but look at memory in another shape."""

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
        is_old = all(_storage(x) in storages for x in results if isinstance(x, Tensor))
        name = getattr(func, "__name__", str(func))
        if name not in LOOKS or not is_old:
            self.unknown = self.unknown or name
        return result


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _aligned(size: int) -> NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]
