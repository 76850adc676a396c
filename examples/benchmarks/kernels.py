"""Compares the CPU kernels with plain torch: kernels.py [--rounds 9] [--threads 1].

Prints the matrix products of every level that this processor executes, then attention and sampling
at the best one. Both sides take turns. Products: the fastest round; attention and sampling: medians
over the rounds, in one thread's CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from products import header, run_level

from mmdeploy_llm.engine.runner.sampling.draw import DrawParams, draw
from mmdeploy_llm.hooks import VisibleKeys
from mmdeploy_llm.kernels.cpu import CpuKernels, cpu_levels, load

BLOCK = 64
NUM_LOGITS = 151_936
Work = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload for both sides. flops: of its matrix products, 0 for sampling."""

    name: str
    ours: Work
    plain: Work
    flops: float = 0.0


def images(kernels: CpuKernels, length: int, heads: int, head_dim: int) -> Case:
    """Builds the case of full attention over the patches of one image."""
    qkv = torch.randn(length, 3 * heads, head_dim).bfloat16()
    q, k, v = qkv.split(heads, 1)
    seen = torch.full((length,), length)
    visible = VisibleKeys(
        query_starts=torch.tensor([0, length]),
        first_visible=torch.zeros_like(seen),
        end_visible=seen,
    )
    return Case(
        name=f"{length} patches, {heads} heads of {head_dim}",
        ours=lambda: kernels.attend(q, k, v, visible, scale=head_dim**-0.5),
        plain=lambda: F.scaled_dot_product_attention(*(x[None].transpose(1, 2) for x in (q, k, v))),
        flops=4.0 * length**2 * heads * head_dim,
    )


def decode(kernels: CpuKernels, num: int, context: int, heads: tuple[int, int], size: int) -> Case:
    """Builds the case of one new token per sequence over a paged cache; plain torch gets the keys
    and values contiguous."""
    num_heads, kv_heads = heads
    pages = -(-context // BLOCK)
    keys, values = (torch.randn(num * pages, BLOCK, kv_heads, size).bfloat16() for _ in range(2))
    q = torch.randn(num, num_heads, size).bfloat16()
    visible = VisibleKeys(
        query_starts=torch.arange(num + 1),
        first_visible=torch.zeros(num, dtype=torch.int64),
        end_visible=torch.full((num,), context),
        block_tables=torch.arange(num * pages, dtype=torch.int32).view(num, pages),
    )
    k, v = (
        x.view(num, -1, kv_heads, size)[:, :context].transpose(1, 2).contiguous()
        for x in (keys, values)
    )
    return Case(
        name=f"decode, {num} x {context} tokens, {num_heads} heads over {kv_heads} of {size}",
        ours=lambda: kernels.attend(q, keys, values, visible, scale=size**-0.5),
        plain=lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True),
        flops=4.0 * num * context * num_heads * size,
    )


def sampling(kernels: CpuKernels, name: str, spread: float, top_k: int, top_p: float) -> Case:
    """Builds the case of sampling 32 rows of a large vocabulary. spread: standard deviation of the
    logits; a small one makes flat distributions."""
    logits = torch.randn(32, NUM_LOGITS) * spread
    params = DrawParams(
        temperature=np.full(32, 0.8, np.float32),
        top_k=np.full(32, top_k),
        top_p=np.full(32, top_p),
        min_p=np.zeros(32),
        uniforms=np.random.default_rng(0).random(32),
    )
    assert torch.equal(draw(logits, params, kernels), draw(logits, params))
    return Case(
        name=f"sampling, 32 x {NUM_LOGITS}, {name}",
        ours=lambda: draw(logits, params, kernels),
        plain=lambda: draw(logits, params),
    )


def cases(kernels: CpuKernels) -> list[Case]:
    """Returns all cases."""
    return [
        images(kernels, 1024, 12, 64),
        images(kernels, 1024, 16, 80),
        decode(kernels, 32, 300, (14, 2), 64),
        decode(kernels, 32, 300, (16, 2), 128),
        decode(kernels, 32, 300, (12, 12), 64),
        decode(kernels, 1, 8192, (14, 2), 64),
        sampling(kernels, "no filter", 3, 0, 1.0),
        sampling(kernels, "top_k 50, top_p 0.9", 3, 50, 0.9),
        sampling(kernels, "top_p 0.7", 6.6, 0, 0.7),
        sampling(kernels, "top_p 0.7, flat", 3, 0, 0.7),
    ]


def seconds(work: Work, repeats: int) -> float:
    """Returns the CPU time of one call."""
    before = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - before) / repeats


def compare(case: Case, rounds: int) -> str:
    """Runs a case; returns its row of the table."""
    repeats = max(1, int(0.02 / seconds(case.ours, 1)))
    pairs = [(seconds(case.ours, repeats), seconds(case.plain, 1)) for _ in range(rounds)]
    ours, plain = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(theirs / own for own, theirs in pairs)
    rate = f"{case.flops / ours / 1e6:.0f}" if case.flops else ""
    return f"| {case.name} | {ours:.2f} | {rate} | {plain:.2f} | {ratio:.2f} |"


def table(rows: Sequence[str]) -> str:
    """Returns a Markdown table of the rows."""
    head = "| work | kernels, ms | GFLOP/s | torch, ms | torch / kernels |\n|---|---|---|---|---|"
    return "\n".join([head, *rows])


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of the products")
    args = parser.parse_args()
    print(header(), flush=True)
    for level in cpu_levels():
        run_level(level, args.threads)
    print()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(table([compare(case, args.rounds) for case in cases(load())]))


if __name__ == "__main__":
    main()
