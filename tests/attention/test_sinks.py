"""Attention sinks: plain dense attention equals transformers' own, and every backend on the CPU
equals that, with every cache."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from mmdeploy_llm.attention import int4
from mmdeploy_llm.attention.base import KVCache
from mmdeploy_llm.attention.native import NativeAttention
from mmdeploy_llm.attention.reference import ReferenceAttention
from mmdeploy_llm.native import BuildError, load

HEADS, KV_HEADS = 6, 2
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 64, "block_size": 16}


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


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_cache_of_few_bits(cases, native, cache_dtype, dtype, window):
    """Attention equals that over the values that the cache holds: decode over 1100 keys, which are
    two chunks, and a prefill chunk after a prefix."""
    options = {"window": window, "sinks": cases.sinks_of(HEADS)}
    whole = cases.Case(3, [1100, 17], [0, 0], **SIZES, dtype=dtype)
    cache = _empty(whole.cache, cache_dtype)
    native.begin(whole.layout, cache).attend(0, whole.q, whole.k, whole.v)
    case = cases.Case(3, [1, 5], [1099, 12], **SIZES, dtype=dtype)
    found = native.begin(case.layout, cache).attend(0, case.q, case.k, case.v, **options)
    keys, values = (_decoded(cache, x, dtype) for x in ("keys", "values"))
    for row, (k, _) in enumerate(case.full):
        blocks = case.layout.block_tables[row].long()
        held = [x[blocks].flatten(0, 1)[: len(k)] for x in (keys, values)]
        case.full[row] = tuple(held)
    tolerance = cases.TOLERANCE[dtype]
    wanted = case.expected(**options)
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def _empty(like, dtype):
    """Returns an empty cache of few bits with as many blocks."""
    shape = like.keys[0].shape
    if dtype == "int8":
        made = [(torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:3])) for _ in range(2)]
    else:
        codes, scales = int4.encode(torch.zeros(shape))
        made = [(codes.clone(), scales.clone()) for _ in range(2)]
    (keys, key_scales), (values, value_scales) = made
    return KVCache(
        keys=(keys,), values=(values,), key_scales=(key_scales,), value_scales=(value_scales,)
    )


def _decoded(cache, which, dtype):
    """Returns the keys or the values of a cache as numbers."""
    codes = getattr(cache, which)[0]
    scales = cache.scales(0)[0 if which == "keys" else 1]
    if codes.dtype is torch.int8:
        return codes.float() * scales[..., None]
    return int4.decode(codes, scales, dtype).float()
