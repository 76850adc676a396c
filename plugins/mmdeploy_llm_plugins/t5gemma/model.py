"""T5Gemma 2: transformers' encoder of text, Gemma 3's tower, and a decoder with merged attention.

    text, pictures --> encoder, in both directions --> keys and values of every layer
    x = x + norm(attention of norm(x) to the sequence so far and to the encoder, in one softmax)
    x = x + norm(mlp(norm(x)))

One softmax over both needs both keys side by side, so that attention is computed for one sequence
after the other. Shapes: T tokens, L tokens of an item, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2TextEncoder

from mmdeploy_llm.caches import CrossKV, PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import (
    Attention,
    CausalLM,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    NewLayer,
    PlainVisionEncoder,
    to_device,
)
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.encoder_decoder.merged import StepAttention
from mmdeploy_llm_plugins.gemma import model3
from mmdeploy_llm_plugins.gemma.text import decoder_config
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

NAMES = (
    (r"^model\.encoder\.(text_model\.)?embed_tokens\.eoi_embedding$", "model.eoi_embedding"),
    (r"^model\.encoder\.(text_model\.)?embed_tokens\.", "model.embed_tokens."),
    (r"^model\.encoder\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^model\.encoder\.(text_model\.)?", "encoder.inner."),
    (r"^model\.decoder\.", "model."),
    (r"^(model\.layers\.\d+)\.pre_self_attn_layernorm\.", r"\1.input_layernorm."),
    (r"^(model\.layers\.\d+)\.pre_feedforward_layernorm\.", r"\1.post_attention_layernorm."),
    (r"^(model\.layers\.\d+)\.post_feedforward_layernorm\.", r"\1.post_mlp_layernorm."),
)
# Of Gemma 3's tower, without the names of its text model.
TOWER = tuple(pair for pair in model3.RENAMES if "vis" in pair[0] or "multi" in pair[0])
IGNORED = (r"^lm_head\.", r"^model\.decoder\.embed_tokens\.", model3.UNUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedStep(DecoderStep):
    """attention: to the sequences and their items."""

    attention: StepAttention


class MergedAttention(Attention):
    """Attention to the sequence so far, or its window, and to the encoder's item, with the same
    projections for both."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.scale = config.score_scale

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Computes attention with its projections, [T, hidden] -> [T, hidden]."""
        assert isinstance(step, MergedStep), "made by MergedDecoder"
        num_rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk = self._rotated(qkv[:, :num_rotated], step.rope_for(self.window))
        q, k, v = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, num_rotated:]
        attended = step.attention.attend(self.layer, q, k, v, window=self.window, scale=self.scale)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out

    def keys_values(self, states: Tensor) -> Tensor:
        """Returns keys and values of an item, [L, hidden] -> [2, L, K, D]."""
        heads = self.qkv_proj(states).view(states.shape[0], -1, self.head_dim)
        _, keys, values = torch.split(heads, [self.num_heads, *[self.num_kv_heads] * 2], 1)
        assert self.k_norm is not None, "the model has norms of heads"
        return torch.stack([self.k_norm(keys.contiguous()), values])


class MergedLayer(DecoderLayer):
    """A layer with merged attention."""

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """See DecoderLayer."""
        self.self_attn = MergedAttention(config, layer)


class MergedDecoder(Decoder):
    """A decoder that knows the items of a step, with an embedding of its own for one token."""

    def __init__(self, config: DecoderConfig, new_layer: NewLayer) -> None:
        super().__init__(config, new_layer)
        self.eoi_embedding = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.eoi_id = -1

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, [T] -> [T, hidden]."""
        found = self.embed_tokens(ids)
        found *= torch.tensor(self.embed_scale, dtype=found.dtype)
        return torch.where((ids == self.eoi_id)[:, None], self.eoi_embedding, found)

    def forward(self, inputs: ForwardInputs, is_vision: Tensor | None = None) -> Tensor:
        """See Decoder."""
        x, residual = self.embed(inputs.token_ids), None
        step = self.begin(inputs, x, is_vision)
        for layer in self.layers:
            x, residual = layer(x, residual, step)
        out, _ = self.norm.add(x, residual)
        return out

    def begin(self, inputs: ForwardInputs, x: Tensor, is_vision: Tensor | None) -> DecoderStep:
        """See Decoder."""
        step = super().begin(inputs, x, is_vision)
        values = {field.name: getattr(step, field.name) for field in fields(step)}
        return MergedStep(**values, attention=StepAttention(inputs.attn, inputs.cross))


class T5Gemma2ForConditionalGeneration(CausalLM):
    """transformers' class of the same name."""

    attends_itself = True

    def __init__(self, config: Any) -> None:
        encoder, text = config.encoder, config.encoder.text_config
        if config.tie_word_embeddings is False:
            raise ModelNotSupportedError(
                "of T5Gemma 2 only the form with one table of embeddings for encoder, decoder and "
                "head is supported, found tie_word_embeddings = false"
            )
        own = replace(decoder_config(config.decoder), is_tied=True, qk_norm=True)
        super().__init__(own, MergedLayer, MergedDecoder)
        self.model.eoi_id = config.eoi_token_index
        kv = {"num_kv_heads": own.num_kv_heads, "head_dim": own.head_dim}
        self.cache = (PagedKV(**kv),) * own.num_layers
        self.image_id: int = encoder.image_token_id
        self.encoder = TransformersTower(text, T5Gemma2TextEncoder)
        del self.encoder.inner.embed_tokens  # the decoder's are the same
        tower = model3.tower_config(encoder)
        self.visual = PlainVisionEncoder(tower)
        self.projector = model3.Projector(encoder, tower.merge_size)
        self.weight_map = WeightMap(self, renames=(*NAMES, *TOWER), ignored=IGNORED)

    @property
    def cross(self) -> CrossKV:
        """Describes what the layers read of an item, with the heads of this rank."""
        own: Any = self.model.layers[0]
        attention = own.self_attn
        return CrossKV(
            num_layers=self.num_layers,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
        )

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns keys and values of each item, see caches.CrossKV."""
        layers: Any = self.model.layers
        states = [self._read(item) for item in items]
        return [
            torch.stack([layer.self_attn.keys_values(own) for layer in layers]) for own in states
        ]

    def _read(self, item: MediaInput) -> Tensor:
        """Runs the encoder over the tokens of an item and its pictures, [L, hidden]."""
        decoder: Any = self.model
        ids = item.tensors["input_ids"].to(decoder.embed_tokens.weight.device)
        x = decoder.embed(ids)
        if "pixels" in item.tensors:
            rows = self.projector(self.visual(to_device(item.tensors["pixels"], ids.device)))
            x = x.masked_scatter((ids == self.image_id)[:, None], rows.to(x.dtype))
        out: Tensor = self.encoder.inner(inputs_embeds=x[None]).last_hidden_state[0]
        return out

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map. The projection is stored with its axes swapped."""
        targets = super().weight_targets(key)
        if not targets or not key.endswith(model3.TRANSPOSED):
            return targets
        return [Target(name=target.name, transpose=True) for target in targets]
