"""Attention sinks: plain dense attention equals transformers' own, and every backend on the CPU
equals that, with every cache."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from mmdeploy_llm.kernels.cpu import BuildError, load
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention

HEADS, KV_HEADS = 6, 2


@pytest.fixture(scope="module")
def native():
    try:
        return NativeAttention(load())
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


def test_dense_attention_equals_transformers(cases):
    """The dense attention of the tests, in float64."""
    q, k, v = (torch.randn(n, h, 16, dtype=torch.float64) for n, h in ((5, 6), (9, 2), (9, 2)))
    sinks = cases.sinks_of(HEADS).double()
    mask = torch.zeros(5, 9, dtype=torch.float64)
    mask[torch.ones(5, 9, dtype=torch.bool).triu(5)] = -torch.inf
    mask[torch.ones(5, 9, dtype=torch.bool).tril(-2)] = -torch.inf  # a window of six tokens
    module = SimpleNamespace(num_key_value_groups=3, sinks=sinks, training=False)
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    wanted, _ = eager_attention_forward(module, *heads_first, mask, scaling=0.3)
    found = cases.dense(q, k, v, scale=0.3, window=6, sinks=sinks)
    torch.testing.assert_close(found, wanted[0])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"window": 50, "softcap": 2.0}])
def test_equals_dense_attention(cases, name, dtype, options, request):
    backend = ReferenceAttention() if name == "reference" else request.getfixturevalue(name)
    for query_lens, earlier in cases.BATCHES:
        case = cases.Case(len(query_lens), query_lens, earlier, HEADS, KV_HEADS, dtype=dtype)
        case.check(backend, **options, sinks=cases.sinks_of(HEADS))


@pytest.mark.parametrize("name", ["reference", "native"])
def test_sinks_far_from_the_scores(cases, name, request):
    """A sink that is small has no weight, and one that is large has all of it."""
    backend = ReferenceAttention() if name == "reference" else request.getfixturevalue(name)
    case = cases.Case(1, [1, 7], [9, 1], HEADS, KV_HEADS)
    context = backend.begin(case.layout, case.cache)
    rows = case.q, case.k, case.v
    plain = context.attend(0, *rows)
    for far in (1e4, torch.inf):
        none = context.attend(0, *rows, sinks=torch.full((HEADS,), -far))
        torch.testing.assert_close(none, plain)
    assert not context.attend(0, *rows, sinks=torch.full((HEADS,), 1e4)).any()


@pytest.mark.one_is_quick
@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_cache_of_few_bits(cases, native, cache_dtype, dtype, window):
    options = {"window": window, "sinks": cases.sinks_of(HEADS)}
    cases.check_few_bits(native, cache_dtype, dtype, HEADS, KV_HEADS, **options)
