"""Kosmos-2.5: a tower of patches, a resampler, and a decoder with computed positions.

    patches --> tower --> directions of its states --> attention of learned queries --> tokens
    x = embedding * scale + sines of the position + embedding of the segment
    x = x + attention(norm(x))
    x = x + fc2(norm(activation(fc1(norm(x)))))

A picture with its two markers is one segment, all other tokens the other. Positions are [2, T]: the
index of a token, and that minus one in the segment of a picture. Shapes: T tokens, P patches, L
learned queries, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import (
    MLP,
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    LayerNorm,
    Linear,
    MergedLinear,
    NewLayer,
    RotaryConfig,
    refuse_unread,
)
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import activation_of
from mmdeploy_llm_plugins.encoder_decoder.patch_tower import (
    RENAMES,
    PatchTower,
    PatchTowerConfig,
    filled,
)

from .image import PATCHES

OFFSET = 2  # rows of the table beside those of the positions
NAMES = (
    (r"^vision_model\.", "tower."),
    (r"^image_to_text_projection\.(x_attn\.)?", "resampler."),
    (r"^text_model\.lm_head\.", "lm_head."),
    (r"^text_model\.model\.segment_emb\.weight$", "model.segments"),
    (r"^text_model\.(model\.)?", "model."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn_layer_norm\.", ".input_layernorm."),
    (r"\.final_layer_norm\.", ".post_attention_layernorm."),
    (r"\.ffn\.ffn_layernorm\.", ".mlp.norm."),
    (r"\.ffn\.", ".mlp."),
    (r"^model\.layer_norm\.", "model.norm."),
)
IGNORED = (r"embed_positions\.",)
HEAD = r"^text_model\.lm_head\."


class NormedMLP(MLP):
    """Computes fc2(norm(activation(fc1(x))))."""

    def __init__(self, config: DecoderConfig) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        super().__init__(size, inner, size, config.activation)
        self.norm = LayerNorm(inner, config.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the MLP, [T, size] -> [T, size]."""
        out: Tensor = self.fc2(self.norm(self.activation(self.fc1(x))))
        return out


class KosmosLayer(DecoderLayer):
    """A layer whose MLP has a norm inside."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.mlp = NormedMLP(config)


class KosmosDecoder(Decoder):
    """A decoder with a table of positions, and embeddings of two segments."""

    table: Tensor

    def __init__(self, config: DecoderConfig, new_layer: NewLayer) -> None:
        super().__init__(config, new_layer)
        self.segments = nn.Parameter(torch.empty(2, config.hidden_size), requires_grad=False)
        self.pad_id, self.num_rows = 0, 0  # set by the model, of its config
        self.register_buffer("table", torch.empty(0), persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        """Computes the positions, on the CPU."""
        table = sines(self.num_rows, self.embed_tokens.weight.shape[1])
        table[self.pad_id] = 0
        self.table = table.to(device, self.segments.dtype)

    def embedded(self, inputs: ForwardInputs) -> Tensor:
        """See Decoder."""
        x = inputs.merge_media(self.embed_tokens(inputs.token_ids)) * self.embed_scale
        rows, marks = inputs.positions
        segments = (marks < rows).long()
        is_pad = inputs.token_ids == self.pad_id
        if inputs.media_rows is not None:
            is_pad = is_pad.index_fill(0, inputs.media_rows, value=False)
        rows = (rows + self.pad_id + 1).masked_fill(is_pad, self.pad_id)
        return x + (self.table[rows] + self.segments[segments])

    def begin(self, inputs: ForwardInputs, x: Tensor, is_vision: Tensor | None) -> DecoderStep:
        """See Decoder; no layer rotates."""
        return super().begin(replace(inputs, positions=inputs.positions[0]), x, is_vision)


class Resampler(nn.Module):
    """Attention of learned queries to a picture and to themselves."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, self.num_heads = config.text_config.embed_dim, config.text_config.attention_heads
        self.dense = Linear(config.vision_config.hidden_size, size, bias=True)
        self.latent_query = nn.Parameter(
            torch.empty(config.latent_query_num, size), requires_grad=False
        )
        self.q_proj = Linear(size, size, bias=True)
        self.kv_proj = MergedLinear(size, {"k_proj": size, "v_proj": size}, bias=True)
        self.out_proj = Linear(size, size, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        """[P, tower's size] -> [L, size]."""
        read = torch.cat([self.dense(states), self.latent_query])
        parts = (self.q_proj(self.latent_query), *self.kv_proj(read).chunk(2, -1))
        q, k, v = (x.reshape(x.shape[0], self.num_heads, -1).transpose(0, 1) for x in parts)
        found = F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        out: Tensor = self.out_proj(found.transpose(0, 1).flatten(1))
        return out


class Kosmos2_5ForConditionalGeneration(CausalLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        text = config.text_config
        super().__init__(decoder_config(text), KosmosLayer, KosmosDecoder)
        decoder: Any = self.model
        decoder.pad_id = text.pad_token_id
        decoder.num_rows = text.max_position_embeddings + text.pad_token_id + OFFSET
        self.max_positions = text.max_position_embeddings
        self.tower = PatchTower(tower_config(config.vision_config))
        self.resampler = Resampler(config)
        ignored = (*IGNORED, HEAD) if text.tie_word_embeddings else IGNORED
        self.weight_map = WeightMap(self, renames=(*NAMES, *RENAMES), ignored=ignored)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor:
        """See hooks.Model and above."""
        rows = torch.arange(num_tokens)
        marks = rows.clone()
        for span in media:
            end = span.offset + span.item.num_tokens
            marks[max(span.offset - 1, 0) : end + 1] -= 1
        return torch.stack([rows, marks])

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns the tokens of each picture, [L, hidden]. The resampler reads the state of rows
        that only fill up once for each of them, as in transformers; all are the same."""
        patches = [item.tensors[PATCHES][0] for item in items]
        made, found = self.tower([filled(own) for own in patches], adds_empty=True), []
        for own, states in zip(patches, made, strict=True):
            empty = states[-1:].expand(len(own) - len(states) + 1, -1)
            found.append(self.resampler(F.normalize(torch.cat([states[:-1], empty]), dim=-1)))
        return found


def tower_config(vision: Any) -> PatchTowerConfig:
    """Returns the options of the tower."""
    return PatchTowerConfig(
        patch_size=vision.patch_embed_hidden_size,
        num_places=vision.max_num_patches,
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        head_dim=vision.head_dim,
        activation=vision.dense_act_fn,
        norm_eps=vision.layer_norm_eps,
        scale=vision.head_dim**-0.5,
    )


def decoder_config(text: Any) -> DecoderConfig:
    """Returns the options of the decoder."""
    refuse_unread(
        text,
        (
            "embed_dim",
            "layers",
            "ffn_dim",
            "attention_heads",
            "scale_embedding",
            "dropout",
            "attention_dropout",
            "activation_dropout",
            "layerdrop",
            "init_std",
        ),
    )
    return DecoderConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.embed_dim,
        intermediate_size=text.ffn_dim,
        num_layers=text.layers,
        num_heads=text.attention_heads,
        num_kv_heads=text.attention_heads,
        rotary=RotaryConfig(head_dim=text.embed_dim // text.attention_heads, theta=1e4),
        norm_eps=text.layer_norm_eps,
        layer_norms=True,
        has_norm_biases=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        has_gate=False,
        activation=activation_of(text.activation_function),
        embed_scale=math.sqrt(text.embed_dim) if text.scale_embedding else 1.0,
        is_tied=text.tie_word_embeddings,
        nope_layers=frozenset(range(text.layers)),
    )


def sines(num_rows: int, size: int) -> Tensor:
    """Returns sines, then cosines, of each row times falling frequencies, [rows, size] float32."""
    half = size // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(num_rows).float()[:, None] * frequencies
    return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, size - 2 * half))
