"""Pix2Struct: a tower of patches, and T5's decoder.

    x = x + attention(norm(x))        to the sequence so far, with a bias of each distance and head
    x = x + cross attention(norm(x))  to the patches, without one
    x = x + mlp(norm(x))              scores are not scaled

No kernel adds a bias to scores, and this decoder alone needs it: its answers are short, and most of
the time goes into the tower and the cross attention. So attention to the sequence is computed in
plain torch. Shapes: T tokens, L tokens of an item, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import (
    Embedding,
    GatedMLP,
    KernelLayer,
    Linear,
    MergedLinear,
    RMSNorm,
)
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    CrossDecoderConfig,
    EncoderDecoderLM,
    activation_of,
)
from mmdeploy_llm_plugins.encoder_decoder.merged import StepAttention
from mmdeploy_llm_plugins.encoder_decoder.patch_tower import (
    RENAMES,
    PatchTower,
    PatchTowerConfig,
    filled,
)

from .image import PATCHES

LAYER = r"^decoder\.layer\.(\d+)\."
NAMES = (
    (r"^decoder\.lm_head\.", "lm_head."),
    (
        r"^decoder\.layer\.0\.self_attention\.attention\.relative_attention_bias\.weight$",
        "decoder.bias",
    ),
    (rf"{LAYER}self_attention\.", r"decoder.layers.\1.own."),
    (rf"{LAYER}encoder_decoder_attention\.", r"decoder.layers.\1.cross."),
    (rf"{LAYER}mlp\.layer_norm\.", r"decoder.layers.\1.mlp_norm."),
    (rf"{LAYER}mlp\.DenseReluDense\.wi_0\.", r"decoder.layers.\1.mlp.gate_proj."),
    (rf"{LAYER}mlp\.DenseReluDense\.wi_1\.", r"decoder.layers.\1.mlp.up_proj."),
    (rf"{LAYER}mlp\.DenseReluDense\.wo\.", r"decoder.layers.\1.mlp.down_proj."),
    (r"^(decoder\.layers\.\d+)\.(own|cross)\.layer_norm\.", r"\1.\2_norm."),
    (r"^(decoder\.layers\.\d+\.(own|cross))\.attention\.output\.", r"\1.out_proj."),
    (r"^(decoder\.layers\.\d+\.(own|cross))\.attention\.(query|key|value)\.", r"\1.\3."),
)
HEAD = r"^decoder\.lm_head\."


class OwnAttention(nn.Module):
    """Attention to the sequence so far."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.shape = layer, (-1, config.num_heads, config.head_dim)
        self.qkv_proj = MergedLinear(size, {"query": size, "key": size, "value": size})
        self.out_proj = Linear(size, size)

    def forward(self, x: Tensor, attention: StepAttention) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        q, k, v = (part.reshape(self.shape) for part in self.qkv_proj(x).chunk(3, -1))
        attended = attention.attend(self.layer, q, k, v, scale=1.0)
        out: Tensor = self.out_proj(attended.flatten(1))
        return out


class PatchAttention(KernelLayer):
    """Attention to the patches."""

    def __init__(self, config: CrossDecoderConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.layer, self.shape = layer, (-1, config.num_heads, config.head_dim)
        self.query = Linear(size, size)
        self.key = Linear(config.encoder_size, size)
        self.value = Linear(config.encoder_size, size)
        self.out_proj = Linear(size, size)

    def forward(self, x: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        assert inputs.cross is not None, "the model has the attribute cross"
        q = self.query(x).view(self.shape)
        attended = inputs.cross.attend(self.layer, q, scale=1.0)
        out: Tensor = self.out_proj(attended.flatten(1))
        return out

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns keys and values of an item, [L, encoder size] -> [2, L, H, D]."""
        return torch.stack([part(states).view(self.shape) for part in (self.key, self.value)])


class TextLayer(nn.Module):
    """Both kinds of attention and an MLP, each after its norm."""

    def __init__(self, config: CrossDecoderConfig, layer: int, eps: float) -> None:
        super().__init__()
        size = config.hidden_size
        self.own, self.cross = OwnAttention(config, layer), PatchAttention(config, layer)
        activation = activation_of(config.activation)
        self.mlp = GatedMLP(size, config.intermediate_size, activation=activation)
        self.own_norm, self.cross_norm, self.mlp_norm = (RMSNorm(size, eps) for _ in range(3))

    def forward(
        self, x: Tensor, residual: Tensor | None, inputs: ForwardInputs, attention: StepAttention
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), both [T, hidden], not yet added."""
        x, residual = self.own_norm.add(x, residual)
        x, residual = self.cross_norm.add(self.own(x, attention), residual)
        x, residual = self.mlp_norm.add(self.cross(x, inputs), residual)
        return self.mlp(x), residual


class TextDecoder(nn.Module):
    """Computes the hidden states of all tokens."""

    def __init__(self, config: CrossDecoderConfig, text: Any) -> None:
        super().__init__()
        self.num_buckets = text.relative_attention_num_buckets
        self.max_distance = text.relative_attention_max_distance
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        shape = self.num_buckets, config.num_heads
        self.bias = nn.Parameter(torch.empty(shape), requires_grad=False)  # never in few bits
        eps = text.layer_norm_epsilon
        self.layers = nn.ModuleList(
            TextLayer(config, layer, eps) for layer in range(config.num_layers)
        )
        self.final_layer_norm = RMSNorm(config.hidden_size, eps)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns [T, hidden]."""
        x, residual = self.embed_tokens(inputs.token_ids), None
        attention = StepAttention(inputs.attn, bias=self._bias_of)
        for layer in self.layers:
            x, residual = layer(x, residual, inputs, attention)
        out, _ = self.final_layer_norm.add(x, residual)
        return out

    def _bias_of(self, distances: Tensor) -> Tensor:
        """Returns the bias of scores, [n, L] -> [H, n, L]."""
        count = distances.shape[1]
        buckets = distance_buckets(count, self.num_buckets, self.max_distance)
        return self.bias[buckets.to(distances.device)].T[:, distances]

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns what all layers read of an item, [L, encoder size] -> [layers, 2, L, H, D]."""
        layers: Any = self.layers
        return torch.stack([layer.cross.keys_values(states) for layer in layers])


class Pix2StructForConditionalGeneration(EncoderDecoderLM):
    """transformers' class of the same name."""

    attends_itself = True

    def __init__(self, config: Any) -> None:
        text, vision = config.text_config, config.vision_config
        if vision.hidden_size != text.hidden_size:
            raise ModelNotSupportedError(
                f"the tower has {vision.hidden_size} channels and the decoder {text.hidden_size}: "
                "Pix2Struct has nothing between them, so that both must be equal"
            )
        if text.num_heads * text.d_kv != text.hidden_size:
            raise ModelNotSupportedError(
                f"{text.num_heads} heads of {text.d_kv} channels are not the hidden_size "
                f"{text.hidden_size}, as which Pix2Struct's decoder stores them"
            )
        made = CrossDecoderConfig(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            intermediate_size=text.d_ff,
            num_layers=text.num_layers,
            num_heads=text.num_heads,
            encoder_size=vision.hidden_size,
            encoder_positions=vision.seq_len,
            num_positions=None,
            activation=text.dense_act_fn,
            is_tied=config.tie_word_embeddings,
        )
        super().__init__(made, lambda own: TextDecoder(own, text))
        kept = PagedKV(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        self.cache = (kept,) * self.num_layers
        self.encoder = PatchTower(tower_config(vision))
        ignored = (HEAD,) if made.is_tied else ()
        self.weight_map = WeightMap(self, renames=(*NAMES, *RENAMES), ignored=ignored)

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the tower for all pictures, without the rows that only fill up."""
        found: list[Tensor] = self.encoder([filled(item.tensors[PATCHES][0]) for item in items])
        return found


def tower_config(vision: Any) -> PatchTowerConfig:
    """Returns the options of the tower."""
    return PatchTowerConfig(
        patch_size=vision.patch_embed_hidden_size,
        num_places=vision.seq_len,
        size=vision.hidden_size,
        intermediate_size=vision.d_ff,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        head_dim=vision.d_kv,
        activation=vision.dense_act_fn,
        norm_eps=vision.layer_norm_eps,
        scale=1.0,
    )


def distance_buckets(count: int, num_buckets: int, max_distance: int) -> Tensor:
    """Returns the bucket of each distance from 0 on, [count]: one for each short distance, then
    ever wider ones up to max_distance, as in T5."""
    distances = torch.arange(count)
    exact = num_buckets // 2
    share = torch.log(distances.float() / exact) / math.log(max_distance / exact)
    wide = exact + (share * (num_buckets - exact)).clamp(min=0).long()
    return torch.where(distances < exact, distances, wide.clamp(max=num_buckets - 1))
