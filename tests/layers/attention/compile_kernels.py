"""Compiles the attention kernels for GPUs that this machine lacks, as the launches of real calls
would. Run it without TRITON_INTERPRET, with the compute capabilities as arguments (90 for 9.0), or
"90:1" for the first shape only. Prints a line for each kernel that does not fit its GPU, for
example because registers are spilled to memory."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.kernels.cuda import heads, int4, paged, paged_kernels
from mmdeploy_llm.layers.attention.int4 import INT4, encode

# capability -> shared memory that a block of threads may use
GPUS = {80: 166_912, 86: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
SHAPES = [  # heads, key heads, head size, page, dtype of q, dtype of the cache
    (28, 4, 128, 128, torch.bfloat16, torch.bfloat16),
    (16, 16, 80, 16, torch.float16, torch.float16),
    (32, 2, 256, 1, torch.bfloat16, torch.int8),
    (28, 4, 128, 24, torch.float32, torch.float32),
    (8, 4, 256, 64, torch.float32, torch.float32),
    (12, 2, 64, 64, torch.bfloat16, torch.float8_e4m3fn),
    (28, 4, 128, 64, torch.bfloat16, INT4),
    (16, 16, 80, 16, torch.float16, INT4),
    (32, 2, 192, 1, torch.bfloat16, INT4),
    (8, 4, 64, 64, torch.float32, INT4),
]

MOST_STACK = 256  # bytes


class Device:
    """The part of a driver that Triton needs in order to compile."""

    def __init__(self, capability):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return self._target.arch  # kernels are kept by device

    def get_current_stream(self, device):
        return 0

    def __getattr__(self, name):
        raise AssertionError(f"compiling asks the driver for {name}")


class Compiled:
    """A kernel whose launches only compile."""

    def __init__(self, kernel, found):
        self._kernel = kernel
        self._found = found

    def __getitem__(self, grid):
        def launch(*args, **options):
            self._found.append(self._kernel.warmup(*args, grid=grid, **options))

        return launch


def bytes_of_stack(kernel):
    """Returns the stack of each thread in bytes; registers that are spilled are stored there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [program, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", output)[1])


def compile_shape(shape, capability):
    """Compiles prefill with and without ranges, decode in one split and in several, and the write
    of keys, both unchanged and rotated."""
    num_heads, kv_heads, head_dim, page, dtype, cache_dtype = shape
    q = torch.empty(300, num_heads, head_dim, dtype=dtype)
    k = torch.empty(300, kv_heads, head_dim, dtype=dtype)
    if cache_dtype is INT4:
        pool, scales = encode(torch.empty(9, page, kv_heads, head_dim))
    else:
        pool = torch.empty(9, page, kv_heads, head_dim, dtype=cache_dtype)
        scales = torch.empty(9, page, kv_heads) if cache_dtype.itemsize == 1 else None
    pages = paged.Pages(keys=pool, values=pool, key_scales=scales, value_scales=scales)
    gpu = paged.Gpu(num_processors=100, shared_memory=GPUS[capability])
    ints = torch.zeros(300, dtype=torch.int32)
    for window, softcap, ranges in ((None, None, None), (9, 2.0, ints)):
        sinks = None if window is None else torch.empty(num_heads)
        scores = paged.Scores(scale=0.1, window=window, softcap=softcap, sinks=sinks)
        for num_seqs, max_context in ((2, 5000), (299, 100)):
            sequences = paged.Sequences(
                starts=ints[: num_seqs + 1],
                context_lens=ints[:num_seqs],
                tables=ints[:, None].expand(300, 7).contiguous()[:num_seqs],
                max_query=200,
                max_context=max_context,
                first_visible=ranges,
                end_visible=ranges,
            )
            paged.decode(q, q.clone(), pages, sequences, scores, gpu)
        paged.prefill(q, q.clone(), pages, sequences, scores, gpu)
    slots = torch.zeros(300, dtype=torch.int64)
    cache = pool, pool, slots, scales, scales
    heads.write_cache(k, k, *cache)
    norms = {"q_weight": q[0, 0], "k_weight": q[0, 0], "eps": 1e-6}
    for size, is_interleaved, own in ((head_dim, False, {}), (head_dim - 16, True, norms)):
        angles = torch.empty(300, size // 2)
        rotary = QKRotary(cosines=angles, sines=angles, is_interleaved=is_interleaved, **own)
        heads.write_cache(k, k, *cache, q=q, rotary=rotary)


def main(wanted):
    found = []
    for module, names in (
        (paged_kernels, ("prefill_kernel", "decode_kernel", "combine_kernel")),
        (heads, ("_heads",)),
        (int4, ("_encode",)),
    ):
        for name in names:
            setattr(module, name, Compiled(getattr(module, name), found))
    for one in wanted:
        capability, _, count = one.partition(":")
        capability = int(capability)
        shared = GPUS[capability]
        driver.set_active(Device(capability))
        for shape in SHAPES[: int(count) if count else None]:
            if capability < 89 and shape[-1] == torch.float8_e4m3fn:
                continue
            found.clear()
            compile_shape(shape, capability)
            assert len(found) >= 10, found
            for kernel in found:
                if kernel.metadata.shared > shared:
                    print(f"{kernel.name} {capability} {shape}: {kernel.metadata.shared} bytes")
                if bytes_of_stack(kernel) > MOST_STACK:
                    print(f"{kernel.name} {capability} {shape}: {bytes_of_stack(kernel)} spilled")
        print("compiled for", capability)


if __name__ == "__main__":
    main(sys.argv[1:])
