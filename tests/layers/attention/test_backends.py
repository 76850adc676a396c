"""The CPU backends, compared with plain dense attention over random ragged batches with scattered
blocks."""

import pytest
import torch

from mmdeploy_llm.hooks import KVCache
from mmdeploy_llm.kernels.cpu import BuildError, load
from mmdeploy_llm.layers.attention import int4, native
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention


@pytest.fixture(params=["reference", "native"])
def backend(request):
    """The backends that compute on the CPU."""
    if request.param == "reference":
        return ReferenceAttention()
    try:
        return NativeAttention(load())
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_equals_dense_attention(cases, backend, heads, kv_heads):
    for query_lens, earlier in cases.BATCHES:
        cases.Case(len(query_lens), query_lens, earlier, heads, kv_heads).check(backend)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("options", range(6))
def test_options_equal_dense_attention(cases, backend, options):
    for query_lens, earlier in cases.BATCHES:
        case = cases.Case(len(query_lens), query_lens, earlier)
        case.check(backend, **cases.OPTIONS[options])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("options", range(-1, 6))
def test_tokens_of_a_span_attend_to_each_other(cases, backend, options):
    for query_lens, earlier, spans in cases.SPANS:
        case = cases.Case(7, query_lens, earlier, spans=spans)
        case.check(backend, **({} if options < 0 else cases.OPTIONS[options]))


def test_steps_of_as_many_tokens_share_a_frame(cases, backend):
    """The numbers of sequences and tokens are the same, and the tokens divided differently."""
    cache = KVCache(keys=(torch.zeros(40, 4, 2, 16),), values=(torch.zeros(40, 4, 2, 16),))
    for query_lens in ([1, 5], [2, 4], [3, 3], [1, 1, 4], [2, 4], [6], [8], [1, 5], [6]):
        for options in ({}, {"window": 3}):
            case = cases.Case(sum(query_lens), query_lens, [7, 0, 30][: len(query_lens)])
            for pages, own in ((cache.keys, case.cache.keys), (cache.values, case.cache.values)):
                pages[0][: len(own[0])] = own[0]
            case.cache = cache
            case.check(backend, **options)


def test_few_frames_are_kept(cases, monkeypatch):
    monkeypatch.setattr(native, "MAX_FRAMES", 2)
    try:
        backend = NativeAttention(load())
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")
    cache = cases.Case(0, [1], [60]).cache

    def frame(*query_lens):
        own = cases.Case(1, list(query_lens), [5] * len(query_lens))
        return backend.begin(own.layout, cache).frame

    one, two = frame(1), frame(1, 2)
    assert frame(1) is one
    three = frame(2, 2)
    assert frame(1) is one, "it was used after the other one"
    assert frame(2, 2) is three
    assert frame(1, 2) is not two
    assert frame(9) is None


def test_random_cases_cover_everything_that_backends_compute(cases):
    """Every head size occurs with prefill alone and with decode, decode alone, prefix hits,
    contexts that end with a full page and inside one, and keys that several queries share; all
    ratios of heads occur."""
    found = {size: set() for size in cases.HEAD_SIZES}
    ratios = set()
    for seed in range(cases.NUM_RANDOM):
        case, _ = cases.random_case(seed)
        (_, page, kv_heads, size), num_heads = case.cache.keys[0].shape, case.q.shape[1]
        ratios.add(num_heads // kv_heads)
        num_decode, num_all = case.layout.num_decode, len(case.query_lens)
        kind = "mixed" if 0 < num_decode < num_all else "decode" if num_decode else "prefill"
        found[size] |= {kind, "shared" if num_heads > kv_heads else "own"}
        for earlier, total in zip(case.earlier, case.layout.context_lens, strict=True):
            found[size].add("cold" if not earlier else "rest" if earlier % page else "prefix hit")
            found[size].add("in a page" if total % page else "full page")
    wanted = {"mixed", "decode", "prefill", "cold", "rest", "prefix hit", "in a page", "full page"}
    assert all(wanted | {"shared"} <= kinds for kinds in found.values()), found
    assert ratios == set(cases.RATIOS)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seed", range(120, 150))
def test_random_batches(cases, backend, seed):
    case, options = cases.random_case(seed)
    case.check(backend, **options)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("seed", range(120, 150))
def test_an_int4_cache_gives_the_bits_of_the_values_that_it_stores(cases, backend, seed):
    """Attention over codes equals attention over decoded keys and values, those of this step
    included."""
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    case, options = cases.random_case(seed, dtype=dtype)

    def stored(x):
        return int4.decode(*int4.encode(x), dtype)

    pages = [int4.encode(x[0]) for x in (case.cache.keys, case.cache.values)]
    (keys, key_scales), (values, value_scales) = pages
    cache = KVCache(
        keys=(keys,), values=(values,), key_scales=(key_scales,), value_scales=(value_scales,)
    )
    found = backend.begin(case.layout, cache).attend(0, case.q, case.k, case.v, **options)
    decoded = KVCache(keys=(stored(case.cache.keys[0]),), values=(stored(case.cache.values[0]),))
    k, v = stored(case.k), stored(case.v)
    context = backend.begin(case.layout, decoded)
    assert torch.equal(found, context.attend(0, case.q, k, v, **options))
    assert torch.equal(int4.decode(keys, key_scales, dtype), decoded.keys[0])
    assert torch.equal(int4.decode(values, value_scales, dtype), decoded.values[0])


def test_cache_of_another_dtype_is_read_back_in_the_query_dtype(cases):
    case = cases.Case(4, [1, 6], [4, 2])
    cache = KVCache(
        keys=tuple(x.bfloat16() for x in case.cache.keys),
        values=tuple(x.bfloat16() for x in case.cache.values),
    )
    out = ReferenceAttention().begin(case.layout, cache).attend(0, case.q, case.k, case.v)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), case.expected(), atol=5e-2, rtol=5e-2)
