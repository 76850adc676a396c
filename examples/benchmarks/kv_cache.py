"""Compares the dtypes of the KV cache: tokens in a GiB, and the time of decode steps over long
contexts.

    python examples/benchmarks/kv_cache.py MODEL_FOLDER --context 8192 --sequences 1 4

Runs decode steps of a text model in bfloat16 over a cache whose tokens have random keys and values;
the dtypes take turns. Prints medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from models_here import check_folder
from quantization_quality import BLOCK_SIZE, load

from mmdeploy_llm.caches import PagedKV, layer_caches
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import BatchLayout, KVCache
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.native import NativeAttention

DTYPES = (torch.bfloat16, torch.int8, torch.int4)


def fill(cache: KVCache, shape: KVCacheShape, kernels: native.CpuKernels) -> None:
    """Writes random keys and values to every slot."""
    slots = torch.arange(cache.keys[0].shape[0] * shape.block_size)
    for index, layer in enumerate(shape.layers):
        assert isinstance(layer, PagedKV), "a uniform text model"
        key_scales, value_scales = cache.scales(index)
        for pages, scales in ((cache.keys, key_scales), (cache.values, value_scales)):
            rows = torch.randn(len(slots), layer.num_kv_heads, layer.head_dim).bfloat16()
            kernels.write_cache(rows, pages[index], slots, scales)


class Steps:
    """Decode steps of some sequences with `context` tokens each."""

    def __init__(
        self, model: Any, kernels: native.CpuKernels, dtype: torch.dtype, num: int, context: int
    ) -> None:
        self._model, self._num, self._context = model, num, context
        blocks_each = -(-context // BLOCK_SIZE)
        self.shape = KVCacheShape(layers=layer_caches(model), block_size=BLOCK_SIZE, dtype=dtype)
        self._tables = torch.arange(num * blocks_each, dtype=torch.int32).view(num, blocks_each)
        self._cache = allocate(self.shape, self._tables.numel(), torch.device("cpu"))
        fill(self._cache, self.shape, kernels)
        self._backend = NativeAttention(kernels)

    @torch.inference_mode()
    def run(self) -> float:
        """Returns the seconds of one step, the output head included."""
        last = self._context - 1
        layout = BatchLayout(
            num_decode=self._num,
            query_lens=(1,) * self._num,
            context_lens=(self._context,) * self._num,
            block_tables=self._tables,
            slots=self._tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        )
        begun = time.perf_counter()
        inputs = ForwardInputs(
            token_ids=torch.arange(self._num) + 20,
            positions=torch.full((self._num,), last),
            in_prompt=torch.zeros(self._num, dtype=torch.bool),
            attn=self._backend.begin(layout, self._cache),
        )
        self._model.logits(self._model.forward(inputs))
        return time.perf_counter() - begun


def main() -> None:
    """Prints a table row for each number of sequences and each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence (8192)")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4], help="(1 4)")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each dtype (15)")
    options = parser.parse_args()
    check_folder(parser, options.folder)
    kernels = native.load()
    model = load(options.folder, kernels, None)
    print("| sequences | KV cache | tokens per GiB | ms per step |\n|---|---|---|---|")
    for num in options.sequences:
        steps = [Steps(model, kernels, dtype, num, options.context) for dtype in DTYPES]
        times = [[each.run() for each in steps] for _ in range(options.rounds + 2)][2:]
        for each, own in zip(steps, zip(*times, strict=True), strict=True):
            tokens = 2**30 // each.shape.bytes_per_block * BLOCK_SIZE
            name = str(each.shape.dtype).removeprefix("torch.")
            print(f"| {num} | {name} | {tokens:,} | {1000 * statistics.median(own):.1f} |")


if __name__ == "__main__":
    main()
