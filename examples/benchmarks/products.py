"""Times the matrix products of one level of the CPU kernels against torch's float32 GEMM, which the
environment caps at the same level. kernels.py runs it once for each level, in a process of its own.

The weights are those of Qwen2-0.5B: the products of its layers, and its head.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.cpu import CpuKernels, Level, load
from mmdeploy_llm.values.options.weight_formats import FORMATS, QuantizationName

LAYER = ((1152, 896), (896, 896), (9728, 896), (896, 4864))  # [n, k] of qkv, out, gate and up, down
HEAD = ((151_936, 896),)
ROWS = (1, 8, 16, 32, 128, 512)
MAX_HEAD_ROWS = 32  # only the last token of a sequence needs logits
NUM_LAYERS = 4  # so that the weights do not fit in the cache
SECONDS = 0.5  # for one figure of one side
Product = Callable[[Tensor], object]

# The variables by which oneDNN, MKL and torch's own loops keep to a level. MKL obeys on Intel's
# processors only: on others it runs AVX2 at every level.
ONEDNN = {
    Level.AMX: "AVX512_CORE_AMX",
    Level.AVX512_BF16: "AVX512_CORE_BF16",
    Level.AVX512_VNNI: "AVX512_CORE_VNNI",
    Level.AVX512: "AVX512_CORE",
    Level.AVX2_VNNI: "AVX2_VNNI",
    Level.AVX2: "AVX2",
    Level.NEON_I8MM: "ADVANCED_SIMD",
    Level.NEON_DOT: "ADVANCED_SIMD",
    Level.PORTABLE: "SSE41",
}


def capped(level: Level) -> dict[str, str]:
    """Returns the environment of a process whose torch keeps to `level`."""
    is_512, is_2 = level.value.startswith(("amx", "avx512")), level.value.startswith("avx2")
    return os.environ | {
        "ONEDNN_MAX_CPU_ISA": ONEDNN[level],
        "MKL_ENABLE_INSTRUCTIONS": "AVX512" if is_512 else "AVX2" if is_2 else "SSE4_2",
        "ATEN_CPU_CAPABILITY": "avx512" if is_512 else "avx2" if is_2 else "default",
    }


def run_level(level: Level, num_threads: int) -> None:
    """Prints the lines of a level, from a process with a capped torch."""
    command = [sys.executable, __file__, level.value, str(num_threads)]
    subprocess.run(command, env=capped(level), check=True)


def plain(weight: Tensor) -> Product:
    """Returns torch's own float32 product."""
    return lambda x: F.linear(x, weight)


def floating(kernels: CpuKernels, dtype: torch.dtype, weight: Tensor) -> Product:
    """Returns the kernels' product in float32 or bf16."""
    if dtype is torch.float32:
        packed, n = kernels.pack_float(weight.to(dtype, copy=True)), len(weight)
        return lambda x: kernels.linear_float(x, packed, n, None)
    whole = kernels.pack(weight.to(dtype), None)
    assert whole is not None
    return lambda x: whole.product(x, None)


def rounded(kernels: CpuKernels, quantization: QuantizationName, weight: Tensor) -> Product:
    """Returns the kernels' product of bf16 activations with weights in few bits."""
    whole = kernels.pack(weight, quantization)
    assert whole is not None
    return lambda x: whole.product(x, None)


def fastest(sides: dict[str, list[tuple[Product, Tensor]]]) -> dict[str, float]:
    """Returns the least seconds of each side; they take turns. With one thread its CPU time counts,
    which other work on the machine does not lengthen."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(sides, float("inf"))
    end = time.perf_counter() + SECONDS * len(sides)
    while time.perf_counter() < end or max(best.values()) == float("inf"):
        for name, work in sides.items():
            begin = clock()
            for product, x in work:
                product(x)
            best[name] = min(best[name], clock() - begin)
    return best


def rates(kernels: CpuKernels, shapes: tuple[tuple[int, int], ...], rows: int) -> dict[str, float]:
    """Returns operations per second of torch and of each product."""
    makers: dict[str, tuple[Callable[[Tensor], Product], torch.dtype]] = {
        "torch float32": (plain, torch.float32),
        "float32": (partial(floating, kernels, torch.float32), torch.float32),
        "bf16": (partial(floating, kernels, torch.bfloat16), torch.bfloat16),
    } | {name: (partial(rounded, kernels, name), torch.bfloat16) for name in FORMATS}
    sides = {
        name: [(make(torch.randn(n, k)), torch.randn(rows, k).to(dtype)) for n, k in shapes]
        for name, (make, dtype) in makers.items()
    }
    work = 2 * rows * sum(n * k for n, k in shapes)
    return {name: work / seconds for name, seconds in fastest(sides).items()}


def lines(level: Level, kernels: CpuKernels) -> Iterator[str]:
    """Yields the rows of the level's table: billions of operations per second, and the ratio to
    torch's float32."""
    for name, shapes, counts in (
        ("layers", LAYER * NUM_LAYERS, ROWS),
        ("head", HEAD, tuple(rows for rows in ROWS if rows <= MAX_HEAD_ROWS)),
    ):
        found = [rates(kernels, shapes, rows) for rows in counts]
        for side in found[0]:
            cells = [f"{each[side] / 1e9:.0f}" for each in found]
            if side != "torch float32":
                ratios = (each[side] / each["torch float32"] for each in found)
                cells = [f"{cell} ({ratio:.2f})" for cell, ratio in zip(cells, ratios, strict=True)]
            cells += [""] * (len(ROWS) - len(cells))
            yield f"| {level.value} | {name} | {side} | {' | '.join(cells)} |"


def header() -> str:
    """Returns the head of the table."""
    names = " | ".join(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS)
    return f"| level | weights | product | {names} |\n|{'---|' * (3 + len(ROWS))}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("kernels.py runs this for each level of instructions: run kernels.py")
    torch.set_num_threads(int(sys.argv[2]))
    torch.manual_seed(0)
    for line in lines(Level(sys.argv[1]), load(level=sys.argv[1])):
        print(line, flush=True)
