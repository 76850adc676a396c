"""Llama 3.2 Vision: transformers' tower of tiles, and a Llama with layers of cross attention.

    tiles --> tower, a state of the last layer and of some before it --> projector --> keys, values
    x = x + tanh(gate) * cross attention(norm(x))      in place of self attention, in some layers
    x = x + tanh(gate) * mlp(norm(x))                  nothing for tokens that see no picture

A step whose requests have no pictures passes these layers over. Shapes: T tokens, L tokens of an
item, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mllama.modeling_mllama import MllamaVisionModel

from mmdeploy_llm.caches import CrossKV, PagedKV
from mmdeploy_llm.forward import CrossContext, ForwardInputs
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import (
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    Embedding,
    GatedMLP,
    KernelLayer,
    Linear,
    NewLayer,
    standard_decoder,
)
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

from .image import tile_tokens

RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^(model\.)?vision_model\.", "vision.inner."),
    (r"^(model\.)?multi_modal_projector\.", "projector."),
)
IGNORED = (r"rotary_emb\.inv_freq$",)
NUM_ADDED = 8  # embeddings of tokens that are never written, of which the picture's is the first


@dataclass(frozen=True, slots=True, kw_only=True)
class MllamaStep(DecoderStep):
    """cross: see ForwardInputs."""

    cross: CrossContext


class CrossAttention(KernelLayer):
    """Attention to pictures, with norms of the heads of q and k."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.layer, self.shape = layer, (-1, config.num_heads, dim)
        self.kv_shape = -1, config.num_kv_heads, dim
        self.q_proj = Linear(size, config.num_heads * dim)
        self.k_proj = Linear(size, config.num_kv_heads * dim)
        self.v_proj = Linear(size, config.num_kv_heads * dim)
        self.o_proj = Linear(config.num_heads * dim, size)
        self.q_norm, self.k_norm = config.new_norm(dim), config.new_norm(dim)

    def forward(self, x: Tensor, cross: CrossContext) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        q = self.q_norm(self.q_proj(x).view(self.shape))
        out: Tensor = self.o_proj(cross.attend(self.layer, q).flatten(1))
        return out

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns keys and values of an item, [L, hidden] -> [2, L, K, D]."""
        keys, values = (part(states).view(self.kv_shape) for part in (self.k_proj, self.v_proj))
        return torch.stack([self.k_norm(keys), values])


class CrossLayer(nn.Module):
    """Cross attention and MLP, each after its norm and with a gate; see DecoderLayer."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        """layer: among those with cross attention."""
        super().__init__()
        self.input_layernorm = config.new_input_norm()
        self.cross_attn = CrossAttention(config, layer)
        self.post_attention_layernorm = config.new_input_norm()
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, activation=config.activation
        )
        self.cross_attn_attn_gate = nn.Parameter(torch.empty(1), requires_grad=False)
        self.cross_attn_mlp_gate = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(
        self, x: Tensor, residual: Tensor | None, step: MllamaStep
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (output, residual stream), both [T, hidden], not yet added."""
        if not step.cross.has_items:
            return x, residual
        x, residual = self.input_layernorm.add(x, residual)
        mixed = self.cross_attn(x, step.cross) * self.cross_attn_attn_gate.tanh()
        x, residual = self.post_attention_layernorm.add(mixed, residual)
        x = self.mlp(x) * self.cross_attn_mlp_gate.tanh()
        blind = step.cross.blind_rows
        return x if blind is None else x.index_fill_(0, blind, 0), residual


class MllamaDecoder(Decoder):
    """A decoder that knows the items of a step, and embeddings of tokens that are never written."""

    def __init__(self, config: DecoderConfig, new_layer: NewLayer) -> None:
        super().__init__(config, new_layer)
        self.embed_tokens = Embedding(config.vocab_size + NUM_ADDED, config.hidden_size)

    def begin(self, inputs: ForwardInputs, x: Tensor, is_vision: Tensor | None) -> DecoderStep:
        """See Decoder."""
        assert inputs.cross is not None, "the model has the attribute cross"
        step = super().begin(inputs, x, is_vision)
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        return MllamaStep(**values, cross=inputs.cross)


class MllamaForConditionalGeneration(CausalLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        text, vision = config.text_config, config.vision_config
        crossing = set(text.cross_attention_layers) & set(range(text.num_hidden_layers))
        decoder = replace(standard_decoder(text, own=("cross_attention_layers",)), is_tied=False)

        def new_layer(config: DecoderConfig, index: int) -> nn.Module:
            num_before = sum(one < index for one in crossing)
            if index in crossing:
                return CrossLayer(config, num_before)
            return DecoderLayer(config, index - num_before)

        super().__init__(decoder, new_layer, MllamaDecoder)
        kv: dict[str, Any] = {"num_kv_heads": decoder.num_kv_heads, "head_dim": decoder.head_dim}
        self.cache = (PagedKV(**kv),) * (decoder.num_layers - len(crossing))
        longest = vision.max_num_tiles * tile_tokens(vision)
        self.cross = CrossKV(num_layers=len(crossing), longest=longest, **kv)
        self.vision = TransformersTower(vision, MllamaVisionModel)
        self.projector = Linear(vision.vision_output_dim, text.hidden_size, bias=True)
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=IGNORED)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns keys and values of each item, see caches.CrossKV; all tiles go through the tower
        together."""
        device = self.model.embed_tokens.weight.device
        pixels, ratios, mask = (
            torch.cat([item.tensors[name] for item in items]).to(device)
            for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
        )
        found = self.vision.inner(pixels.to(self.vision.dtype), ratios, mask).last_hidden_state
        states = self.projector(found.flatten(1, 3))
        layers = [layer for layer in self.model.layers if isinstance(layer, CrossLayer)]
        return [
            torch.stack([layer.cross_attn.keys_values(own) for layer in layers]) for own in states
        ]
