"""Measures the machine's rates of matrix products and memory reads, in two or three seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.cpu import CpuKernels
from mmdeploy_llm.system.portable import limits
from mmdeploy_llm.values.options.weight_formats import FORMATS

Precision = str  # a dtype, or the name of a weight format

# Shape of the timed product: 512 rows times a weight of 4096 x 1024.
NUM_ROWS, OUT_SIZE, IN_SIZE = 512, 4096, 1024
READ_BYTES = 2**28  # much larger than any CPU cache
SECONDS_EACH, MIN_CALLS = 0.5, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Peak rates of a machine.

    flops: multiplications and additions per second in matrix products of `precision`.
    bandwidth: bytes read from memory per second.
    level: the instruction sets of the C++ kernels, None without them.
    """

    precision: Precision
    flops: float
    bandwidth: float
    level: str | None = None


def measure_machine(
    device: torch.device,
    precision: Precision,
    kernels: CpuKernels | None,
    level: str | None = None,
) -> Machine:
    """Returns the best rates of torch and, when given, of the C++ kernels. level: theirs."""
    products = _products(device, precision, kernels)
    flops = max(_rate(product, 2 * NUM_ROWS * OUT_SIZE * IN_SIZE, device) for product in products)
    values = torch.zeros(READ_BYTES // 4, device=device)
    bandwidth = _rate(values.sum, READ_BYTES, device)
    return Machine(precision=precision, flops=flops, bandwidth=bandwidth, level=level)


def peak_memory(device: torch.device) -> int:
    """Returns the peak bytes so far: of this process, 0 where the system does not tell them, or on
    CUDA of the device's tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return limits.peak_memory()


def _products(
    device: torch.device, precision: Precision, kernels: CpuKernels | None
) -> Iterator[Callable[[], Tensor]]:
    """Yields implementations of the same product."""
    own = FORMATS.get(precision)
    if own is not None and own.group_size is None:
        yield from _int8_products(device, kernels)
        return
    if own is not None:
        assert kernels is not None, "the engine needs them too"
        coded = kernels.pack(torch.rand(OUT_SIZE, IN_SIZE).bfloat16(), precision)
        assert coded is not None
        wide = torch.rand(NUM_ROWS, IN_SIZE).bfloat16()
        yield lambda: coded.product(wide, None)
        return
    dtype = getattr(torch, precision)
    x = torch.rand(NUM_ROWS, IN_SIZE, device=device).to(dtype)
    weight = torch.rand(OUT_SIZE, IN_SIZE, device=device).to(dtype)
    yield lambda: F.linear(x, weight)
    if kernels is not None and kernels.can_pack(weight, None):
        packed = kernels.pack_float(weight.clone())
        yield lambda: kernels.linear_float(x, packed, OUT_SIZE, None)


def _int8_products(
    device: torch.device, kernels: CpuKernels | None
) -> Iterator[Callable[[], Tensor]]:
    x = torch.randint(-127, 128, (NUM_ROWS, IN_SIZE), dtype=torch.int8, device=device)
    weight = torch.randint(-127, 128, (OUT_SIZE, IN_SIZE), dtype=torch.int8, device=device)
    yield lambda: torch._int_mm(x, weight.T)
    if kernels is not None:
        packed, scales, wide = kernels.pack_s8(weight), torch.ones(2, OUT_SIZE), x.bfloat16()
        yield lambda: kernels.linear_s8(wide, packed, scales, None)


def _rate(call: Callable[[], object], amount: int, device: torch.device) -> float:
    """Returns `amount` per second of the fastest call."""
    call()
    best, num_calls, end = float("inf"), 0, time.perf_counter() + SECONDS_EACH
    while num_calls < MIN_CALLS or time.perf_counter() < end:
        num_calls += 1
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return amount / best
