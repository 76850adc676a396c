"""Moonshine: transformers' encoder of samples, and a decoder that attends to its output.

    x = x + self attention(norm(x))     with a rotary embedding of the first channels of each head
    x = x + cross attention(norm(x))
    x = x + mlp(norm(x))                gated

Shapes: T tokens, L tokens of a sound, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.moonshine.modeling_moonshine import MoonshineEncoder

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import (
    Embedding,
    GatedMLP,
    LayerNorm,
    Linear,
    MergedLinear,
    Rotary,
    RotaryConfig,
    rotary_config,
)
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    NORM_EPS,
    CrossAttention,
    CrossDecoderConfig,
    EncoderDecoderLM,
    activation_of,
)
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

NAMES = (
    (r"^model\.encoder\.", "encoder.inner."),
    (r"^model\.decoder\.", "decoder."),
    (r"^proj_out\.", "lm_head."),
    (r"^(decoder\.layers\.\d+\.mlp)\.fc2\.", r"\1.down_proj."),
    (r"^(decoder\.layers\.\d+\.encoder_attn)\.o_proj\.", r"\1.out_proj."),
)
UP_AND_GATE = ".mlp.fc1."


class SelfAttention(nn.Module):
    """Attention to the sequence so far."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.num_heads, self.head_dim = layer, config.num_heads, config.head_dim
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv_proj = MergedLinear(size, parts, bias=config.bias)
        self.o_proj = Linear(size, size, bias=config.out_bias)

    def forward(self, x: Tensor, inputs: ForwardInputs, rope: Any) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        qkv = self.qkv_proj(x).view(x.shape[0], 3 * self.num_heads, self.head_dim)
        qk, v = rope.rotate(qkv[:, : 2 * self.num_heads]), qkv[:, 2 * self.num_heads :]
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        out: Tensor = self.o_proj(inputs.attn.attend(self.layer, q, k, v).flatten(1))
        return out


class MoonshineLayer(nn.Module):
    """Self attention, cross attention and MLP, each with a norm before it."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = SelfAttention(config, layer)
        self.encoder_attn = CrossAttention(config, layer)
        activation = activation_of(config.activation)
        self.mlp = GatedMLP(size, config.intermediate_size, bias=True, activation=activation)
        self.input_layernorm, self.post_attention_layernorm, self.final_layernorm = (
            new_norm(size) for _ in range(3)
        )

    def forward(self, x: Tensor, inputs: ForwardInputs, rope: Any) -> Tensor:
        """Computes the layer, [T, hidden] -> [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x), inputs, rope)
        x = x + self.encoder_attn(self.post_attention_layernorm(x), inputs)
        out: Tensor = x + self.mlp(self.final_layernorm(x))
        return out


class MoonshineDecoder(nn.Module):
    """Computes the hidden states of all tokens."""

    def __init__(self, config: CrossDecoderConfig, rotary: RotaryConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            MoonshineLayer(config, layer) for layer in range(config.num_layers)
        )
        self.norm = new_norm(config.hidden_size)
        self.rotary = Rotary(rotary)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns [T, hidden]."""
        x, rope = self.embed_tokens(inputs.token_ids), self.rotary(inputs.positions)
        for layer in self.layers:
            x = layer(x, inputs, rope)
        out: Tensor = self.norm(x)
        return out

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns what all layers read of a sound, [L, hidden] -> [layers, 2, L, H, D]."""
        layers: Any = self.layers
        return torch.stack([layer.encoder_attn.keys_values(states) for layer in layers])


def new_norm(size: int) -> LayerNorm:
    """Builds a norm without a bias."""
    return LayerNorm(size, NORM_EPS, has_bias=False)


class MoonshineForConditionalGeneration(EncoderDecoderLM):
    """transformers' class of the same name. Raises ModelNotSupportedError for heads that share
    keys: transformers' class has the queries of as many heads as there are keys."""

    def __init__(self, config: Any) -> None:
        heads, shared = config.decoder_num_attention_heads, config.decoder_num_key_value_heads
        if heads != shared:
            raise ModelNotSupportedError(
                f"decoder_num_key_value_heads {shared} of this moonshine model is not supported, "
                f"only as many as there are heads, {heads}"
            )
        size = config.hidden_size
        own = CrossDecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=size,
            intermediate_size=config.intermediate_size,
            num_layers=config.decoder_num_hidden_layers,
            num_heads=heads,
            encoder_size=size,
            encoder_positions=0,
            num_positions=config.max_position_embeddings,
            activation=config.decoder_hidden_act,
            bias=config.attention_bias,
            key_bias=config.attention_bias,
            out_bias=False,
            is_tied=config.tie_word_embeddings,
        )
        rotary = rotary_config(config, is_interleaved=True)
        super().__init__(own, partial(MoonshineDecoder, rotary=rotary))
        self.cross = replace(self.cross, longest=None)  # sounds have any length
        # A copy: its layers write the number of their heads into it.
        self.encoder = TransformersTower(copy.deepcopy(config), MoonshineEncoder)
        copies = (r"^proj_out\.",) if config.tie_word_embeddings else ()
        self.weight_map = WeightMap(self, renames=NAMES, ignored=copies)
        self._inner = config.intermediate_size

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model. The checkpoint has the rows of `up` before those of `gate`."""
        before, found, end = key.partition(UP_AND_GATE)
        if not found or not before.startswith("model.decoder."):
            return super().weight_targets(key)
        name = f"{before.removeprefix('model.')}.mlp.gate_up_proj.{end}"
        first, second = slice(0, self._inner), slice(self._inner, 2 * self._inner)
        return (
            Target(name=name, rows=first, source=second),
            Target(name=name, rows=second, source=first),
        )

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the encoder for one sound after the other: a norm reads all of a sound."""
        device = self.decoder.embed_tokens.weight.device
        return [self._heard(item.tensors["input_values"].to(device)) for item in items]

    def _heard(self, samples: Tensor) -> Tensor:
        """Returns the encoder's output of samples [1, N], [L, hidden]."""
        out: Tensor = self.encoder.inner(samples.to(self.encoder.dtype)).last_hidden_state[0]
        return out
