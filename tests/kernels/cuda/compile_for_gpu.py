"""A program: compiles the kernels for a GPU that need not be there, as launches with tensors of the
given dtype ask for them. Prints the name of each kernel, what it takes of an SM, what it spills.

    env -u TRITON_INTERPRET python tests/kernels/cuda/compile_for_gpu.py bfloat16

With a compute capability, such as 80, only the products with weights of few bits, for that.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import JITFunction

from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.kernels import RouteRule
from mmdeploy_llm.kernels.coded import CodedWeight
from mmdeploy_llm.kernels.cuda import choose, experts, int8, low_rank
from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels
from mmdeploy_llm.kernels.cuda.heads import write_cache
from mmdeploy_llm.kernels.low_rank import Change
from mmdeploy_llm.layers.attention.int4 import encode

CAPABILITY = 90  # H100, H200


class Absent:
    """Replaces the driver of the GPU."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


def compile_only(compiled, capability=CAPABILITY):
    """Makes launches compile only, and add their kernel to `compiled`."""
    run = JITFunction.run

    def run_nothing(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = run_nothing
    triton.runtime.driver.set_active(Absent(capability))


def launch_all(dtype):
    kernels = CudaKernels(torch.device("cpu"))
    x, weight = torch.zeros(3, 3584, dtype=dtype), torch.ones(3584, dtype=dtype)
    kernels.rms_norm(x, weight, 1e-6)
    kernels.rms_norm(x, weight, 1e-6, x.clone())
    kernels.silu_mul(*torch.zeros(3, 2 * 18944, dtype=dtype).chunk(2, -1))
    heads, norm = torch.zeros(3, 36, 128, dtype=dtype), torch.ones(128, dtype=dtype)
    for num_pairs in (64, 32):
        angles = torch.zeros(2, 3, num_pairs)
        for is_interleaved in (False, True):
            kernels.rotate(heads[:, :32], *angles, is_interleaved=is_interleaved)
            rotary = QKRotary(
                cosines=angles[0],
                sines=angles[1],
                is_interleaved=is_interleaved,
                q_weight=norm,
                k_weight=norm,
                eps=1e-6,
            )
            kernels.norm_and_rotate(heads[:, :32], 28, rotary)
    for head_dim in (80, 128):
        k, cache = heads[:, :4, :head_dim], encode(torch.zeros(9, 16, 4, head_dim))
        slots = torch.zeros(3, dtype=torch.int64)
        write_cache(k, k, cache[0], cache[0], slots, cache[1], cache[1])
    launch_experts(kernels, dtype)
    launch_choice(dtype)
    launch_codes(kernels, dtype)
    launch_adapters(dtype)


def launch_adapters(dtype):
    starts = (0, 3584, 4096, 4608)
    table = low_rank.Table(2, starts, 3584, dtype, torch.device("cpu"))
    for rank in (16, 64):
        a, b = torch.zeros(3 * rank, 3584), torch.zeros(4608, rank)
        table.put(0, Change(a=a, b=b, starts=starts, scales=(1.0, 1.0, 1.0)))
        x, out = torch.zeros(3, 3584, dtype=dtype), torch.zeros(3, 4608, dtype=dtype)
        table.add(out, x, torch.zeros(3, dtype=torch.int32))


def launch_experts(kernels, dtype):
    for bias, is_normed in ((None, False), (torch.zeros(64), True)):
        rule = RouteRule(top_k=6, is_normed=is_normed, norm_min=1e-12)
        kernels.choose(torch.zeros(3, 64, dtype=dtype), bias, rule, dtype)
    gate_up, down = torch.zeros(4, 2 * 64, 256, dtype=dtype), torch.zeros(4, 256, 64, dtype=dtype)
    for tile in experts.TILES:
        num_tokens = 2 * tile.rows
        ids = torch.zeros(num_tokens, 2, dtype=torch.int64)
        weights = torch.zeros(num_tokens, 2, dtype=dtype)
        kernels.run_experts(torch.zeros(num_tokens, 256, dtype=dtype), weights, ids, gate_up, down)


def launch_codes(kernels, dtype):
    formats = ((4, 32, False), (4, 128, False), (8, 16, False), (8, 128, False), (8, 128, True))
    for bits, group_size, is_float8 in formats:
        weight = CodedWeight(
            is_float8=is_float8,
            bits=bits,
            k=4096,
            group_size=group_size,
            units=torch.zeros(4096, 4096 * bits // 32, dtype=torch.int32),
            scales=torch.zeros(4096, 4096 // group_size),
            zeros=torch.zeros(4096, 4096 // group_size, dtype=torch.uint8),
        )
        packed = kernels.pack_coded(weight, rounds=False)
        packed.product(torch.zeros(3, 4096, dtype=dtype), None)
        packed.product(torch.zeros(3, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype))
        packed.dequantized(dtype)
    rows = int8.Int8Rows(
        torch.zeros(4096, 4096, dtype=torch.int8), *torch.ones(2, 4096), torch.device("cpu")
    )
    for bias in (None, torch.zeros(4096, dtype=dtype)):
        rows.product(torch.zeros(3, 4096, dtype=dtype), bias)
        rows.product(torch.zeros(33, 4096, dtype=dtype), bias)


def launch_choice(dtype):
    rules = choose.Rules(
        ints=torch.zeros(4, 8, dtype=torch.int64),
        reals=torch.zeros(4, 8, dtype=torch.float64),
        edit_ids=torch.zeros(4, 16, dtype=torch.int32),
        edit_values=torch.zeros(4, 16),
        counts=torch.zeros(4, 152064, dtype=torch.int16),
    )
    logits, slots = torch.zeros(3, 152064, dtype=dtype), torch.arange(3)
    choose.choose(logits, slots, rules)
    choose.choose(logits, slots, rules, forced=slots)


def main(dtype, capability=None):
    compiled = []
    compile_only(compiled, int(capability or CAPABILITY))
    if capability is None:
        launch_all(getattr(torch, dtype))
    else:
        launch_codes(CudaKernels(torch.device("cpu")), getattr(torch, dtype))
    distinct = {id(kernel): (name, kernel) for name, kernel in compiled}
    for name, kernel in distinct.values():
        print(name, usage(kernel, int(capability or CAPABILITY)))


def usage(kernel, capability):
    """Measures with the assembler that Triton itself uses for this GPU; Triton ships two of
    them."""
    assembler = get_ptxas(capability).path
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        output = subprocess.run(
            [
                assembler,
                "-v",
                f"-arch=sm_{capability}{'a' * (capability >= 90)}",
                source,
                "-o",
                "/dev/null",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", output)[1]
    spilled = re.search(r"(\d+) bytes spill stores", output)[1]
    threads = 32 * kernel.metadata.num_warps
    return (
        f"threads {threads} registers {registers} shared {kernel.metadata.shared} spilled {spilled}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
