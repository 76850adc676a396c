"""Library: loads the C++ library and records calls of its functions."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from mmdeploy_llm.kernels.base import Kernels
from mmdeploy_llm.values.options.weight_formats import FORMATS, WeightFormat

from .build import Level
from .calls import Calls
from .memory import LargePages
from .recording import Capture, Memory, Recorder, Recording
from .sealed import BuildError

FLOATS = (torch.float32, torch.bfloat16)


class Library(Kernels):
    """The loaded C++ library. Its functions run on torch's threads, as many as
    torch.get_num_threads returns.

    has_wide_registers: whether the level has registers of 32 bytes or more.
    leaves_many_rows_to_torch: whether torch's float32 products are faster for many rows. They use
        AVX, for which the kernels have no level.
    can_resize: whether the kernels resize images faster than Pillow does.
    has_fixed_order: whether every product is computed here, where the order of a row's sums does
        not depend on the other rows; torch's depends on their number.
    formats: how weights are rounded, by quantization: FORMATS, or with another group size for one.
    level: what the library was built for; None where that is not known.
    """

    is_compiled = True
    memory: LargePages

    def __init__(
        self,
        path: Path,
        *,
        level: Level | None = None,
        fixed_order: bool = False,
        formats: Mapping[str, WeightFormat] = FORMATS,
    ) -> None:
        """Loads the library. Raises BuildError when it or torch's OpenMP runtime cannot be
        loaded."""
        try:
            for runtime in openmp_runtimes():
                ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"the kernels cannot be loaded: {error}") from error
        self._run = library.mm_run
        self._calls = Calls(library)
        self._library: Calls | Recorder | Capture = self._calls
        self._run.argtypes = (c_void_p, c_int64, c_int32)
        self._run.restype = None
        self._empty: Callable[..., Tensor] = torch.empty
        self._softcaps: dict[float, Tensor] = {}  # by cap, the results for all bf16
        self.memory = LargePages()
        self.has_wide_registers = library.mm_vector_bytes() > 16
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        self.cpu_level = level and level.value
        self.has_fixed_order = fixed_order
        self.formats = formats
        is_narrow = is_x86 and not self.has_wide_registers
        self.leaves_many_rows_to_torch = is_narrow and not fixed_order
        self.can_resize = not is_narrow  # SSE2 has no product of 32-bit integers
        self._recorded_memory = Memory()

    def record(
        self, function: Callable[..., Tensor], *inputs: Tensor
    ) -> tuple[Tensor, Recording | None]:
        """Returns function(*inputs) and a recording of its kernel calls; None where the function
        does more than call kernels and view their results."""
        assert self._library is self._calls, "recordings are not nested"
        recorder = Recorder(self._calls, self._run, self._recorded_memory)
        self._library, self._empty = recorder, self._recorded_memory.empty
        try:
            return recorder.record(function, inputs)
        finally:
            self._library, self._empty = self._calls, torch.empty

    def captured(self, function: Callable[[], object]) -> Sequence[tuple[str, Structure]]:
        """Returns the names and arguments of the kernel calls that `function` would make, which are
        not made."""
        library, capture = self._library, Capture(self._calls)
        self._library = capture
        try:
            function()
        finally:
            self._library = library
        return capture.found

    def takes(self, *tensors: Tensor | None) -> bool:
        """Whether all are on the CPU, in float32 or in bf16; see Kernels."""
        dtype = None if tensors[0] is None else tensors[0].dtype
        return dtype in FLOATS and all(
            x is None or (x.is_cpu and x.dtype is dtype and x.stride(-1) == 1) for x in tensors
        )


def openmp_runtimes() -> list[str]:
    """Returns the paths of the OpenMP libraries in torch's wheel; [] where torch uses the
    system's."""
    root = Path(torch.__file__).parent
    folders = (root / "lib", root.parent / "torch.libs")
    names = ("libgomp*.so*", "libomp*.dylib")
    return [str(path) for folder in folders for name in names for path in sorted(folder.glob(name))]
