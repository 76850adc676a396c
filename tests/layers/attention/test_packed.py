"""Attention in both directions: kernels and plain torch against the formula, in one step with
other prompts, with windows, groups of heads, caps and sinks."""

import pytest
import torch

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import BatchLayout
from mmdeploy_llm.layers.attention.packed import PackedAttention

LENGTHS = (1, 7, 130, 2, 64)
EMPTY = torch.zeros(0, dtype=torch.int64)


def layout(lengths):
    return BatchLayout(
        num_decode=0, query_lens=lengths, context_lens=lengths, block_tables=EMPTY, slots=EMPTY
    )


def rows(heads, size, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), heads, size, generator=generator).to(dtype)


def expected(q, k, v, window, scale, softcap, sinks):
    out, start = [], 0
    for length in LENGTHS:
        own = slice(start, start + length)
        start += length
        group = q.shape[1] // k.shape[1]
        keys, values = (x[own].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), keys) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        places = torch.arange(length)
        if window is not None:
            far = (places[:, None] - places).abs() > window // 2
            scores = scores.masked_fill(far, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, length, 1)
            weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(out)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((4, 4, 16), {}),
        ((4, 2, 32), {"window": 9}),
        ((4, 1, 64), {"window": 128, "scale": 0.3}),
        ((2, 2, 16), {"window": 1, "softcap": 2.0}),
        ((2, 2, 16), {"softcap": 2.0, "sinks": torch.tensor([0.5, -1.0])}),
    ],
)
def test_it_is_the_formula(kernels, is_native, dtype, heads, options):
    num, num_kv, size = heads
    q, k, v = rows(num, size, 0, dtype), rows(num_kv, size, 1, dtype), rows(num_kv, size, 2, dtype)
    own = kernels.attention if is_native else None
    if is_native:
        assert own.can_attend(q, k, v)
    context = PackedAttention(own).begin(layout(LENGTHS), None)
    options = {"scale": size**-0.5, "window": None, "softcap": None, "sinks": None, **options}
    for _ in range(2):  # the second layer shares the ranges of the first
        found = context.attend(0, q, k, v, **options)
        assert found.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            found.double(), expected(q, k, v, **options), atol=tolerance, rtol=tolerance
        )


def test_no_layer_is_causal():
    with pytest.raises(ModelNotSupportedError, match="is_bidirectional"):
        PackedAttention().begin(layout((3,)), None).causal()
