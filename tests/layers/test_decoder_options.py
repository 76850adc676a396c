"""The options of the standard decoder, compared with their plain formulas, and the parts that they
leave unchanged."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.kernels import plain
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    MoEConfig,
    RMSNorm,
    Rotary,
    RotaryConfig,
    layer_windows,
    rotary_config,
    standard_decoder,
)
from mmdeploy_llm.layers.decoder import DecoderStep
from mmdeploy_llm.layers.moe import SoftmaxRouter, SparseMLP

SIZES = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    rotary=RotaryConfig(head_dim=4),
    norm_eps=1e-6,
)


def fill(module, seed=0):
    """Fills a module with random weights and computes its buffers."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    for child in module.modules():
        if hasattr(child, "init_buffers"):
            child.init_buffers(torch.device("cpu"))
    return module


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Recorder:
    """An attention context that records its arguments and returns the values."""

    def __init__(self):
        self.calls = {}

    def attend(self, layer, q, k, v, *, window=None, sinks=None, alibi=None, **options):
        self.calls[layer] = SimpleNamespace(q=q, k=k, window=window, sinks=sinks, alibi=alibi)
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def run(config):
    model, recorder = fill(CausalLM(config)), Recorder()
    inputs = ForwardInputs(
        token_ids=torch.arange(5),
        positions=torch.arange(5),
        in_prompt=torch.ones(5, dtype=torch.bool),
        attn=recorder,
    )
    return model, recorder.calls, model.forward(inputs)


def test_every_layer_passes_its_own_sinks():
    model, calls, _ = run(replace(SIZES, has_sinks=True))
    for layer, call in calls.items():
        assert call.sinks is model.model.layers[layer].self_attn.sinks
        assert call.sinks.shape == (SIZES.num_heads,)
    assert model.has_sinks
    _, calls, _ = run(SIZES)
    assert calls[0].sinks is None


def test_every_layer_passes_its_own_window():
    _, calls, _ = run(replace(SIZES, windows=(None, 8, 3)))
    assert [calls[layer].window for layer in range(3)] == [None, 8, 3]
    _, calls, _ = run(SIZES)
    assert [calls[layer].window for layer in range(3)] == [None] * 3


def test_heads_are_normed_before_the_rotation():
    model, calls, _ = run(replace(SIZES, qk_norm=True))
    attention = model.model.layers[0].self_attn
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(torch.arange(5)))
    heads = attention.qkv_proj(x).view(5, 8, 4)
    rope = model.model.rotary(torch.arange(5))
    for found, own, norm in (
        (calls[0].q, heads[:, :4], attention.q_norm),
        (calls[0].k, heads[:, 4:6], attention.k_norm),
    ):
        torch.testing.assert_close(found, rope.rotate(norm(own)))


def test_norms_after_attention_and_mlp():
    plain, _, _ = run(SIZES)
    model, _, found = run(replace(SIZES, post_norms=True))
    assert {name for name, _ in plain.named_parameters()} == {
        name
        for name, _ in model.named_parameters()
        if "post_self" not in name and "_mlp_" not in name
    }
    x = model.model.embed_tokens(torch.arange(5))
    rope = model.model.rotary(torch.arange(5))
    for layer in model.model.layers:
        step = DecoderStep(rope=rope, attn=Recorder(), modality=None)
        x = x + layer.post_self_attn_layernorm(layer.self_attn(layer.input_layernorm(x), step))
        x = x + layer.post_mlp_layernorm(layer.mlp(layer.post_attention_layernorm(x)))
    torch.testing.assert_close(found, model.model.norm(x))


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_only_the_first_channels_of_a_head_are_rotated(is_interleaved):
    positions = torch.tensor([0, 3, 70])
    x = randn(3, 2, 10)
    part = fill(Rotary(RotaryConfig(head_dim=10, rotary_dim=6, is_interleaved=is_interleaved)))
    whole = fill(Rotary(RotaryConfig(head_dim=6, is_interleaved=is_interleaved)))
    found = part(positions).rotate(x.clone())
    torch.testing.assert_close(found[..., :6], whole(positions).rotate(x[..., :6].clone()))
    assert torch.equal(found[..., 6:], x[..., 6:])


def test_norm_of_heads_in_chunks(monkeypatch):
    norm, x = fill(RMSNorm(8, 1e-6)), randn(300, 6, 8)
    whole = norm(x)
    monkeypatch.setattr(plain, "MAX_VALUES", 64)
    assert torch.equal(norm(x), whole)
    assert norm(x[:0]).shape == (0, 6, 8)


class TestSoftmaxRouter:
    @pytest.mark.parametrize("is_normed", [False, True])
    def test_weights_are_probabilities_of_the_best(self, is_normed):
        config = MoEConfig(num_experts=5, top_k=2, intermediate_size=12, is_normed=is_normed)
        router, x = fill(SoftmaxRouter(8, config)), randn(7, 8)
        weights, experts = router(x)
        scores = (x @ router.weight.T).softmax(-1)
        best = scores.sort(-1, descending=True)
        assert torch.equal(experts, best.indices[:, :2])
        expected = best.values[:, :2]
        if is_normed:
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights, expected)

    def test_a_gate_weighs_the_shared_expert(self):
        config = MoEConfig(
            num_experts=4, top_k=2, intermediate_size=12, router="softmax", shared_size=20
        )
        x = randn(7, 8)
        gated = fill(SparseMLP(8, replace(config, is_shared_gated=True)))
        routed = gated.experts(x, *gated.gate(x))
        gate = F.linear(x, gated.shared_expert_gate.weight).sigmoid()
        expected = routed + gate * gated.shared_experts(x)
        torch.testing.assert_close(gated(x), expected)
        assert SparseMLP(8, config).shared_expert_gate is None


def text_config(**fields):
    """Returns a config like those of transformers' text models."""
    defaults = {
        "model_type": "new",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_window": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


class TestFromConfig:
    def test_sizes_are_those_of_the_config(self):
        found = standard_decoder(text_config())
        assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 4, 4)
        assert (found.rotary.theta, found.rotary.rotary_dim) == (500.0, None)
        assert (found.windows, found.moe, found.qk_norm) == (None, None, False)

    def test_a_part_of_the_head(self):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
        found = rotary_config(text_config(rope_parameters=rope, head_dim=12))
        assert (found.head_dim, found.rotary_dim, found.num_pairs) == (12, 6, 3)

    def test_dynamic_rope_is_the_default_up_to_the_length_of_the_model(self):
        rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        config = LlamaConfig(rope_parameters=rope, max_position_embeddings=64, head_dim=8)
        found = rotary_config(config)
        assert found.frequencies == pytest.approx([1e4 ** (-i / 8) for i in range(0, 8, 2)])
        assert found.scale == 1.0

    def test_an_unknown_rope_is_refused(self):
        rope = {"rope_type": "spiral", "rope_theta": 1e4}
        with pytest.raises(ModelNotSupportedError, match="'spiral'"):
            rotary_config(text_config(rope_parameters=rope))

    def test_windows(self):
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        assert layer_windows(text_config(sliding_window=9)) == (9, 9, 9)
        assert layer_windows(text_config()) is None
        assert layer_windows(text_config(sliding_window=9, layer_types=kinds)) == (None, 9, None)
        assert layer_windows(text_config(sliding_window=9, layer_types=kinds[:1] * 3)) is None
