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
from transformers.models.moonshine_streaming.modeling_moonshine_streaming import (
    MoonshineStreamingEncoder,
)

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
    (r"^model\.decoder\.(pos_emb|proj)\.", r"\1."),
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
    keys: transformers' class has the queries of as many heads as there are keys.

    prefix: of the names of the decoder's fields in the config.
    """

    def __init__(self, config: Any, prefix: str = "decoder_") -> None:
        heads, num_layers, activation = (
            getattr(config, f"{prefix}{name}")
            for name in ("num_attention_heads", "num_hidden_layers", "hidden_act")
        )
        shared = getattr(config, f"{prefix}num_key_value_heads", heads)
        if heads != shared:
            raise ModelNotSupportedError(
                f"{prefix}num_key_value_heads {shared} of this moonshine model is not supported, "
                f"only as many as there are heads, {heads}"
            )
        size = config.hidden_size
        part = config.rope_parameters.get("partial_rotary_factor", 1.0)
        if int(size // heads * part) % 2:
            raise ModelNotSupportedError(
                f"partial_rotary_factor {part} of this moonshine model rotates an odd number of "
                f"the {size // heads} channels of a head, which is not supported"
            )
        own = CrossDecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=size,
            intermediate_size=config.intermediate_size,
            num_layers=num_layers,
            num_heads=heads,
            encoder_size=size,
            encoder_positions=0,
            num_positions=config.max_position_embeddings,
            activation=activation,
            bias=config.attention_bias,
            key_bias=config.attention_bias,
            out_bias=False,
            is_tied=config.tie_word_embeddings,
        )
        rotary = rotary_config(config, is_interleaved=True)
        super().__init__(own, partial(MoonshineDecoder, rotary=rotary))
        self.cross = replace(self.cross, longest=None)  # sounds have any length
        self.add_encoder(config)
        copies = (r"^proj_out\.",) if config.tie_word_embeddings else ()
        self.weight_map = WeightMap(self, renames=NAMES, ignored=copies)
        self._inner = config.intermediate_size

    def add_encoder(self, config: Any) -> None:
        """Adds transformers' encoder."""
        # A copy: its layers write the number of their heads into it.
        self.encoder = TransformersTower(copy.deepcopy(config), MoonshineEncoder)

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
        return [
            self._heard(*(tensor.to(device) for tensor in item.tensors.values())) for item in items
        ]

    def _heard(self, samples: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the encoder's output of samples [1, N], [L, hidden]. mask: of these, True where
        they are no padding, [1, N]; None: of a family without one."""
        given = {} if mask is None else {"attention_mask": mask}
        found: Tensor = self.encoder.inner(samples.to(self.encoder.dtype), **given)[0][0]
        return found


class MoonshineStreamingForConditionalGeneration(MoonshineForConditionalGeneration):
    """transformers' class of the same name: the encoder reads frames, and each layer of it a window
    of them; its output has learned positions. Raises ModelNotSupportedError for heads of another
    size than divides the hidden size."""

    def __init__(self, config: Any) -> None:
        if config.head_dim * config.num_attention_heads != config.hidden_size:
            raise ModelNotSupportedError(
                f"head_dim {config.head_dim} of this moonshine model is not supported, only "
                f"hidden_size {config.hidden_size} / {config.num_attention_heads} heads"
            )
        super().__init__(config, "")

    def add_encoder(self, config: Any) -> None:
        """Adds transformers' encoder, and what the decoder has for its output."""
        own = config.encoder_config
        self.encoder = TransformersTower(own, MoonshineStreamingEncoder)
        self.pos_emb = Embedding(config.max_position_embeddings, own.hidden_size)
        is_equal = own.hidden_size == config.hidden_size
        self.proj = None if is_equal else Linear(own.hidden_size, config.hidden_size)

    def _heard(self, samples: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class above."""
        states = super()._heard(samples, mask)
        states = states + self.pos_emb(torch.arange(len(states), device=states.device))
        out: Tensor = states if self.proj is None else self.proj(states)
        return out
