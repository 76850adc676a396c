"""A program: what is compiled while an engine runs. Launches the kernels as a warm-up and captured
graphs do, then as steps of all kinds of batches do, for a GPU that need not be there. Prints the
name of each kernel that such a step would have waited for.

    env -u TRITON_INTERPRET python tests/kernels/cuda/compile_a_run.py
"""

import random
from itertools import accumulate

import compile_for_gpu
import torch

from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.hooks import BatchLayout, KVCache, StepLengths
from mmdeploy_llm.kernels import RouteRule
from mmdeploy_llm.kernels.cuda import choose
from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels
from mmdeploy_llm.kernels.cuda.paged import Gpu
from mmdeploy_llm.layers.attention.triton_paged import TritonAttention
from mmdeploy_llm.layers.attention.varlen import Options, calls_of

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB, BLOCK = 6, 2, 64, 384, 5000, 64
MOST_SEQS, LONGEST = 32, 4096


def layout_of(query_lens, context_lens, max_context=None):
    """Returns a layout as the runner makes it, with tensors that are slices of one buffer."""
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    width = max(1, -(-max(context_lens) // BLOCK))
    starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32)
    return BatchLayout(
        num_decode=sum(n == 1 for n in query_lens),
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables=torch.zeros(num_seqs, width, dtype=torch.int32),
        slots=torch.zeros(num_tokens, dtype=torch.int64),
        lengths=StepLengths(
            query_starts=starts,
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            max_query=max(query_lens),
            max_context=max_context or max(context_lens),
        ),
    )


class Engine:
    """The kernel launches of one layer and of sampling."""

    def __init__(self):
        self._kernels = CudaKernels(CPU)
        self._backend = TritonAttention(CPU, Gpu(num_processors=132, shared_memory=232_448))
        pages = [torch.zeros(4, BLOCK, KV_HEADS, HEAD_DIM, dtype=DTYPE) for _ in range(2)]
        self._cache = KVCache(keys=(pages[0],), values=(pages[1],))
        self._norm = torch.ones(HIDDEN, dtype=DTYPE)
        self._router = torch.zeros(8, HIDDEN, dtype=DTYPE)
        self._experts = (
            torch.zeros(8, 2 * 128, HIDDEN, dtype=DTYPE),
            torch.zeros(8, HIDDEN, 128, dtype=DTYPE),
        )

    def step(self, layout, *, room=16, has_counts=False):
        kernels, num_tokens = self._kernels, len(layout.slots)
        x = torch.zeros(num_tokens, HIDDEN, dtype=DTYPE)
        kernels.rms_norm(x, self._norm, 1e-6)
        kernels.rms_norm(x, self._norm, 1e-6, x.clone())
        self._attend(layout, num_tokens)
        kernels.silu_mul(*torch.zeros(num_tokens, 2 * 128, dtype=DTYPE).chunk(2, -1))
        weights, experts = kernels.choose(
            x[:, :8].contiguous(), None, RouteRule(top_k=2, is_normed=False), DTYPE
        )
        kernels.run_experts(x, weights, experts, *self._experts)
        self._choose(len(layout.query_lens), room, has_counts)

    def _attend(self, layout, num_tokens):
        qkv = torch.zeros(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=DTYPE)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        angles = torch.zeros(2, num_tokens, HEAD_DIM // 2)
        rotary = QKRotary(cosines=angles[0], sines=angles[1].clone(), is_interleaved=False)
        self._backend.begin(layout, self._cache).attend(0, q, k, v, rotary=rotary)
        call, _ = calls_of(layout)
        if call is not None:  # of a library that leaves decode to our kernels
            options = Options(scale=0.1, left=None, softcap=None)
            rows = q[: layout.num_decode]
            self._backend.compute(call, rows, self._cache.keys[0], self._cache.values[0], options)

    def _choose(self, num_rows, room, has_counts):
        rules = choose.Rules(
            ints=torch.zeros(MOST_SEQS, 8, dtype=torch.int64),
            reals=torch.zeros(MOST_SEQS, 8, dtype=torch.float64),
            edit_ids=torch.zeros(MOST_SEQS, room, dtype=torch.int32),
            edit_values=torch.zeros(MOST_SEQS, room),
            counts=torch.zeros((MOST_SEQS, VOCAB) if has_counts else 1, dtype=torch.int16),
        )
        logits = torch.zeros(num_rows, VOCAB, dtype=DTYPE)
        choose.choose(logits, torch.arange(num_rows), rules)


def random_layout(draw):
    """Returns decode tokens, prefill chunks or both, with and without prefixes in the cache."""
    num_decode = draw.choice((0, 1, 2, 7, 16, 31))
    prefill = [draw.choice((2, 15, 16, 100)) for _ in range(draw.choice((0, 1, 1, 3, 16)))]
    query_lens = [1] * num_decode + (prefill if num_decode or prefill else [9])
    return layout_of(query_lens, [n + draw.choice((0, 1, 63, 1000, 4000)) for n in query_lens])


def main():
    compiled = []
    compile_for_gpu.compile_only(compiled)
    engine = Engine()
    engine.step(layout_of([15], [15]))  # the warm-up
    engine.step(layout_of([1], [16]))
    for size in (1, 2, 4, 8, 16, MOST_SEQS):
        engine.step(layout_of([1] * size, [1] * size, LONGEST))
    known = {id(kernel) for _, kernel in compiled}
    draw = random.Random(0)
    for number in range(40):
        layout = random_layout(draw)
        engine.step(layout, room=draw.choice((16, 20, 33)), has_counts=number % 3 == 1)
    for name, kernel in compiled:
        if id(kernel) not in known:
            known.add(id(kernel))
            print(name)


if __name__ == "__main__":
    main()
