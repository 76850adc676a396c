"""Every backend against plain dense attention, over random ragged batches with scattered blocks."""

import types

import pytest
import torch

from mmdeploy_llm.attention import select as selection
from mmdeploy_llm.attention.base import BatchLayout, KVCache
from mmdeploy_llm.attention.flash import FlashAttention
from mmdeploy_llm.attention.native import NativeAttention
from mmdeploy_llm.attention.reference import ReferenceAttention
from mmdeploy_llm.config import AttentionChoice, AttentionNeeds
from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError
from mmdeploy_llm.native import BuildError, load


def dense(q, k, v, *, scale=None, window=None, softcap=None, spans=(), is_causal=True):
    """Causal attention of the last len(q) tokens of one sequence, in float64. q [n, H, D], k, v
    [L, K, D]. Tokens of a span see each other."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    for row, query in enumerate(range(len(k) - len(q), len(k))):
        for key in range(len(k)):
            mask[row, key] = (key <= query or not is_causal) and (
                window is None or query - window < key
            )
            mask[row, key] |= any(a <= query < b and a <= key < b for a, b in spans)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)


class Case:
    """A random batch: contexts already in the cache, new tokens of this step, scattered block
    tables."""

    def __init__(
        self, seed, query_lens, earlier, heads=4, kv_heads=2, head_dim=16, block_size=4, spans=()
    ):
        generator = torch.Generator().manual_seed(seed)
        self.query_lens, self.earlier = query_lens, earlier
        totals = [n + e for n, e in zip(query_lens, earlier, strict=True)]
        needs = [-(-t // block_size) for t in totals]
        blocks = torch.randperm(sum(needs) + 3, generator=generator).tolist()
        tables = torch.zeros(len(totals), max(needs), dtype=torch.int32)
        self.full = []
        shape = (len(blocks), block_size, kv_heads, head_dim)
        keys, values = torch.full(shape, 7.0), torch.full(shape, -7.0)
        slots = []
        for row, (total, need, before) in enumerate(zip(totals, needs, earlier, strict=True)):
            own = [blocks.pop() for _ in range(need)]
            tables[row, :need] = torch.tensor(own, dtype=torch.int32)
            k = torch.randn(total, kv_heads, head_dim, generator=generator)
            v = torch.randn(total, kv_heads, head_dim, generator=generator)
            places = torch.tensor(
                [own[i // block_size] * block_size + i % block_size for i in range(total)]
            )
            keys.flatten(0, 1)[places[:before]] = k[:before]
            values.flatten(0, 1)[places[:before]] = v[:before]
            slots.append(places[before:])
            self.full.append((k, v))
        self.q = torch.randn(sum(query_lens), heads, head_dim, generator=generator)
        self.k = torch.cat([k[e:] for (k, _), e in zip(self.full, earlier, strict=True)])
        self.v = torch.cat([v[e:] for (_, v), e in zip(self.full, earlier, strict=True)])
        self.cache = KVCache(keys=(keys,), values=(values,))
        num_decode = next((i for i, n in enumerate(query_lens) if n > 1), len(query_lens))
        self.layout = BatchLayout(
            num_decode=num_decode,
            query_lens=tuple(query_lens),
            context_lens=tuple(totals),
            block_tables=tables,
            slots=torch.cat(slots),
            spans=tuple(spans),
        )

    def expected(self, **options):
        outs = []
        for row, q in enumerate(torch.split(self.q, self.query_lens)):
            spans = [(a, b) for sequence, a, b in self.layout.spans if sequence == row]
            outs.append(dense(q, *self.full[row], spans=spans, **options))
        return torch.cat(outs)


BATCHES = [
    ([1], [0]),
    ([1, 1, 1], [0, 3, 40]),
    ([1, 1, 9], [5, 64, 0]),
    ([5, 8, 1], [0, 11, 7]),
    ([1, 7, 3], [15, 1, 4]),
    ([1] * 12, list(range(0, 120, 10))),
]


@pytest.fixture(params=["reference", "native"])
def backend(request):
    """The backends that compute on the CPU."""
    if request.param == "reference":
        return ReferenceAttention()
    try:
        return NativeAttention(load())
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.mark.parametrize(("query_lens", "earlier"), BATCHES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_equals_dense_attention(backend, query_lens, earlier, heads, kv_heads):
    case = Case(len(query_lens), query_lens, earlier, heads, kv_heads)
    context = backend.begin(case.layout, case.cache)
    out = context.attend(0, case.q, case.k, case.v)
    torch.testing.assert_close(out.double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_new_keys_and_values_lie_in_their_slots(backend):
    case = Case(3, [1, 6], [4, 2])
    backend.begin(case.layout, case.cache).attend(0, case.q, case.k, case.v)
    assert torch.equal(case.cache.keys[0].flatten(0, 1)[case.layout.slots], case.k)
    assert torch.equal(case.cache.values[0].flatten(0, 1)[case.layout.slots], case.v)


def test_cache_of_another_dtype_is_read_back_in_the_query_dtype():
    case = Case(4, [1, 6], [4, 2])
    cache = KVCache(
        keys=tuple(x.bfloat16() for x in case.cache.keys),
        values=tuple(x.bfloat16() for x in case.cache.values),
    )
    out = ReferenceAttention().begin(case.layout, cache).attend(0, case.q, case.k, case.v)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), case.expected(), atol=5e-2, rtol=5e-2)


OPTIONS = [
    {"scale": 0.7},
    {"window": 1},
    {"window": 6},
    {"window": 50},
    {"softcap": 0.5},
    {"scale": 0.3, "window": 9, "softcap": 2.0},
]
SPANS = [  # (query_lens, earlier, spans): whole, behind a prefix hit inside the span, two, decode
    ([9], [0], [(0, 2, 8)]),
    ([1, 7, 9], [5, 3, 0], [(1, 1, 9), (2, 0, 3), (2, 4, 9)]),
    ([5, 12], [6, 9], [(0, 6, 11), (1, 10, 12), (1, 14, 21)]),
    ([1, 4], [8, 0], [(0, 3, 9)]),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("query_lens", "earlier"), BATCHES)
def test_options_equal_dense_attention(backend, query_lens, earlier, options):
    case = Case(len(query_lens), query_lens, earlier)
    context = backend.begin(case.layout, case.cache)
    for _ in range(2):  # the second layer of a window finds its index tensors made
        out = context.attend(0, case.q, case.k, case.v, **options)
        torch.testing.assert_close(out.double(), case.expected(**options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, *OPTIONS])
@pytest.mark.parametrize(("query_lens", "earlier", "spans"), SPANS)
def test_tokens_of_a_span_see_each_other(backend, query_lens, earlier, spans, options):
    case = Case(7, query_lens, earlier, spans=spans)
    context = backend.begin(case.layout, case.cache)
    out = context.attend(0, case.q, case.k, case.v, **options)
    torch.testing.assert_close(out.double(), case.expected(**options), atol=1e-5, rtol=1e-5)


def fake_varlen(
    q,
    keys,
    values,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
    block_table,
):
    """flash_attn_varlen_func's contract for paged caches, dense."""
    left, right = window_size
    assert right == (0 if causal and left >= 0 else -1)
    window = None if left < 0 else left + 1
    out = []
    for row in range(len(cu_seqlens_q) - 1):
        own = q[cu_seqlens_q[row] : cu_seqlens_q[row + 1]]
        length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert len(own) <= max_seqlen_q
        assert length <= max_seqlen_k
        k, v = (x[block_table[row].long()].flatten(0, 1)[:length] for x in (keys, values))
        options = {"scale": softmax_scale, "window": window, "softcap": softcap}
        out.append(dense(own, k, v, is_causal=causal, **options).to(q.dtype))
    return torch.cat(out)


@pytest.mark.parametrize(("query_lens", "earlier"), BATCHES)
def test_flash_hands_the_right_arguments_to_the_kernel(monkeypatch, query_lens, earlier):
    """The bookkeeping around the kernel; the kernel itself needs a GPU and is tested in
    tests/gpu."""
    install_fake_flash(monkeypatch)
    case = Case(9, query_lens, earlier, block_size=256)
    context = FlashAttention().begin(case.layout, case.cache)
    for options in ({}, *OPTIONS):
        out = context.attend(0, case.q, case.k, case.v, **options)
        torch.testing.assert_close(out.double(), case.expected(**options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("query_lens", "earlier", "spans"), SPANS)
def test_flash_lets_tokens_of_a_span_see_each_other(monkeypatch, query_lens, earlier, spans):
    install_fake_flash(monkeypatch)
    case = Case(8, query_lens, earlier, block_size=256, spans=spans)
    context = FlashAttention().begin(case.layout, case.cache)
    for options in ({}, {"window": 12, "scale": 0.4, "softcap": 3.0}):
        out = context.attend(0, case.q, case.k, case.v, **options)
        torch.testing.assert_close(out.double(), case.expected(**options), atol=1e-5, rtol=1e-5)
    with pytest.raises(ModelNotSupportedError, match="longer than the attention window of layer 0"):
        context.attend(0, case.q, case.k, case.v, window=2)


def install_fake_flash(monkeypatch):
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = fake_varlen
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", module)


def needs(name="auto", device="cpu", dtype="bfloat16", block_size=None, kv_cache_dtype=None):
    return AttentionNeeds(
        name=name,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype or dtype,
        block_size=block_size,
    )


class TestSelect:
    @pytest.mark.parametrize(
        ("asked", "has_kernels", "name"),
        [
            (needs(), True, "native"),
            (needs(), False, "reference"),
            (needs(dtype="float32"), True, "native"),
            (needs(dtype="float16"), True, "reference"),
            (needs(kv_cache_dtype="int8"), True, "native"),
            (needs(kv_cache_dtype="float32"), True, "reference"),
            (needs("reference"), True, "reference"),
        ],
    )
    def test_cpu(self, asked, has_kernels, name):
        chosen = selection.select(asked, has_kernels=has_kernels)
        assert (chosen.name, chosen.block_size) == (name, 64)

    def test_block_size_of_the_user_wins(self):
        chosen = selection.select(needs("reference", block_size=16), has_kernels=True)
        assert chosen.block_size == 16

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            (needs("flesh"), "use auto, flash-attn, native, reference"),
            (needs("flash-attn"), "needs a CUDA device"),
            (needs("flash-attn", "cuda", block_size=64), "multiple of 256"),
            (needs("flash-attn", "cuda", kv_cache_dtype="float16"), "kv_cache_dtype = dtype"),
            (needs("native"), "C\\+\\+ kernels, which are not there"),
            (needs("native", "cuda"), "needs a CPU"),
            (needs("native", dtype="float16"), "needs a CPU and bfloat16 or float32"),
            (needs(kv_cache_dtype="int8"), "leave kv_cache_dtype out"),
            (needs(device="cuda", kv_cache_dtype="int8"), "leave kv_cache_dtype out"),
        ],
    )
    def test_what_cannot_be(self, asked, message):
        with pytest.raises(ConfigError, match=message):
            selection.select(asked, has_kernels=False)

    def test_flash_chooses_its_block_size(self):
        asked = needs("flash-attn", "cuda:0", "float16")
        assert selection.select(asked, has_kernels=False).block_size == 256

    def test_create(self, monkeypatch):
        def made(name, head_dim=64):
            return selection.create(AttentionChoice(name=name, block_size=64), object(), head_dim)

        assert isinstance(made("reference"), ReferenceAttention)
        assert isinstance(made("native"), NativeAttention)
        for head_dim in (7, 514):
            with pytest.raises(ConfigError, match=f"have {head_dim} channels"):
                made("native", head_dim)

    def test_missing_flash_attn_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
        with pytest.raises(ConfigError, match=r"pip install mmdeploy-llm\[cuda\]"):
            FlashAttention()
