"""Heads that are moved, scaled and rotated: attention stays the same, and 4 bits hold more."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.caches import PagedKV, SharedKV, State
from mmdeploy_llm.engine.startup import key_ranges
from mmdeploy_llm.hooks.objects.attention import BatchLayout, KVCache
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.cpu.cpu_kernels import load
from mmdeploy_llm.kernels.plain import hadamard
from mmdeploy_llm.layers.attention import int4
from mmdeploy_llm.layers.attention.hadamard import HadamardAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.layers.basic.recordings import Recordings
from mmdeploy_llm.testing.tiny import write_tiny

TOKENS, HEADS, KV_HEADS = 24, 4, 2
LAYOUT = BatchLayout(
    num_decode=0,
    query_lens=(TOKENS,),
    context_lens=(TOKENS,),
    block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
    slots=torch.arange(TOKENS),
)


def values(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def qkv(head_dim, value_dim):
    """Keys of which a channel is far from 0 and one is much larger, as those of real models."""
    q, k = values(TOKENS, HEADS, head_dim), values(TOKENS, KV_HEADS, head_dim, seed=1)
    k[..., 1] += 30
    k[..., 2] *= 20
    return q / 10, k, values(TOKENS, KV_HEADS, value_dim, seed=2)


def cache_of(head_dim, value_dim):
    sizes = ((2, 16, KV_HEADS, size) for size in (head_dim, value_dim))
    keys, values = (torch.zeros(size) for size in sizes)
    return KVCache(keys=(keys,), values=(values,))


def wrapped(head_dim, value_dim, kernels=None):
    layer = PagedKV(num_kv_heads=KV_HEADS, head_dim=head_dim, value_dim=value_dim)
    layers = (layer, SharedKV(layer=0), State(shapes=((2,),), dtypes=("model",)))
    return HadamardAttention(
        ReferenceAttention(), kernels or Kernels(), layers, torch.device("cpu")
    )


@pytest.mark.parametrize("size", [2, 6, 16, 64, 80, 96, 128, 192, 256, 576])
def test_a_rotation_is_its_own_inverse(size):
    matrix = hadamard(size)
    assert len(matrix) in (2, 16, 32, 64)
    assert size % len(matrix) == 0
    torch.testing.assert_close(matrix @ matrix, torch.eye(len(matrix)))
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("level", ["portable", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [6, 64, 80, 192])
def test_the_kernel_computes_as_torch_does(level, dtype, size):
    joined = values(5, 2 * HEADS, size).to(dtype)
    factors, centres = values(KV_HEADS, size, seed=1), values(KV_HEADS, size, seed=2)
    for x in (joined, joined[:, HEADS:], joined[:, :, :]):
        for given in ((None, None), (centres, factors), (None, factors), (centres, None)):
            found = load(level=level).mix_heads(x, hadamard(size), *given)
            expected = Kernels().mix_heads(x, hadamard(size), *given)
            torch.testing.assert_close(
                found, expected, rtol=1e-5 if dtype is torch.float32 else 8e-3, atol=1e-5
            )


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": torch.ones(HEADS)}])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 80), (32, 32)])
def test_attention_is_the_same(head_dim, value_dim, options):
    q, k, v = qkv(head_dim, value_dim)
    plain = ReferenceAttention().begin(LAYOUT, cache_of(head_dim, value_dim))
    expected = plain.attend(0, q, k, v, **options)
    backend = wrapped(head_dim, value_dim)
    for way in (backend.measuring, nullcontext):
        with way():
            context = backend.begin(LAYOUT, cache_of(head_dim, value_dim))
            found = context.attend(0, q, k, v, **options)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert bool(backend.heads[0].centres.abs().max() > 1) == (not options)
    assert backend.heads[1] is backend.heads[0]
    assert 2 not in backend.heads


def test_four_bits_hold_more_of_the_scores():
    q, k, v = qkv(64, 64)
    backend = wrapped(64, 64)
    with backend.measuring():
        backend.begin(LAYOUT, cache_of(64, 64)).attend(0, q, k, v)
    heads, matrix = backend.heads[0], backend.matrices[64]

    def error(q, k, exact):
        scores = q.view(TOKENS, KV_HEADS, -1, 64) @ int4.decode(*int4.encode(k), k.dtype)[..., None]
        return (scores - exact).square().mean()

    grouped = q.view(TOKENS, KV_HEADS, -1, 64)
    before = error(q, k, grouped @ k[..., None])
    mix = backend.kernels.mix_heads
    turned = mix(q, matrix, None, heads.query_factors)
    after = error(turned, mix(k, matrix, heads.centres, heads.key_factors),
                  grouped @ (k - heads.centres)[..., None])  # fmt: skip
    assert after < before / 20


def test_what_is_not_finite_or_alone_changes_nothing():
    for q, k, _ in (qkv(64, 64), [x[:1] for x in qkv(64, 64)]):
        backend = wrapped(64, 64)
        if len(k) > 1:
            k[3, 0, 5] = torch.inf
        with backend.measuring():
            backend.heads[0].count(q, k, can_move=True)
        assert torch.equal(backend.heads[0].key_factors, torch.ones(KV_HEADS, 64))
        assert not backend.heads[0].centres.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "qwen3"
    write_tiny("qwen3", folder, head_dim=16, num_hidden_layers=2)
    return str(folder)


def test_steps_are_recorded_and_keys_are_measured(folder, monkeypatch):
    seen, run = [], Recordings.run
    monkeypatch.setattr(Recordings, "run", lambda *given: (seen.append(given[0]), run(*given))[1])
    backends, measure = [], key_ranges.measure_keys
    monkeypatch.setattr(
        "mmdeploy_llm.engine.startup.runners.measure_keys",
        lambda backend, *given: (backends.append(backend), measure(backend, *given))[1],
    )
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, dtype="bfloat16", kv_cache_dtype="int4", kv_cache_memory=2**22) as llm:
        assert llm.generate([[70, 71, 72]], params)[0].is_ok
    assert any(own is not None for recordings in seen for own in recordings.values())
    assert all(heads.centres.any() for heads in backends[0].heads.values())


def test_a_failure_is_told(caplog):
    failed = SimpleNamespace(errors={"x": SimpleNamespace(message="no memory")})
    key_ranges.measure_keys(wrapped(64, 64), lambda plan: failed, list(range(10)), 16)
    assert "the step that measures them failed: no memory" in caplog.text


def test_a_sample_has_as_many_tokens_as_a_sequence_may_have():
    tokenizer = SimpleNamespace(encode=lambda text: list(range(500)))
    assert [len(key_ranges.sample_ids(tokenizer, n)) for n in (None, 4096, 64)] == [128, 128, 63]
