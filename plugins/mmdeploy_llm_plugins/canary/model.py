"""Canary and Cohere ASR: transformers' FastConformer encoder (ParakeetEncoder), and a decoder with
norms before its parts that attends to its output.

Shapes: T tokens, F mel frames, L tokens of a sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import rename_source_key

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Linear
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    CrossDecoder,
    CrossDecoderConfig,
    EncoderDecoderLM,
)
from mmdeploy_llm_plugins.transformers_parts.fast_conformer import COUNTERS
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

NAMES = (
    (r"^(model\.)?encoder\.", "encoder.inner."),
    (r"^model\.decoder\.", "decoder."),
    (r"^decoder\.proj\.", "proj."),
    (r"^decoder\.norm\.", "decoder.layer_norm."),
    (r"^decoder\.pos_emb\.", "decoder.embed_positions."),
    (r"^decoder\.embedding_layernorm\.", "decoder.layernorm_embedding."),
    (r"^(decoder\.layers\.\d+\.(self|encoder)_attn)\.o_proj\.", r"\1.out_proj."),
    (r"^(decoder\.layers\.\d+)\.input_layernorm\.", r"\1.self_norm."),
    (r"^(decoder\.layers\.\d+)\.post_attention_layernorm\.", r"\1.encoder_norm."),
    (r"^(decoder\.layers\.\d+)\.final_layernorm\.", r"\1.mlp_norm."),
    (r"^proj_out\.weight", "lm_head.weight"),
    (r"^proj_out\.bias", "head_bias"),
)
NOT_READ = (COUNTERS, r"^preprocessor\.featurizer\.")


class FixedPositions(nn.Module):
    """Computes sines and cosines of positions, as transformers' CanaryPositionalEmbedding has them
    in a table: timescales from 1 to 10000 ** ((size - 2) / size), divided by sqrt(size)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, positions: Tensor) -> Tensor:
        """Returns float32, [T] -> [T, size]."""
        half = self.size // 2
        step = math.log(10_000 ** ((self.size - 2) / self.size)) / (half - 1)
        scales = torch.exp(-step * torch.arange(half, device=positions.device).float())
        angles = positions[:, None] * scales
        return torch.cat([angles.sin(), angles.cos()], 1) / math.sqrt(self.size)


class CanaryDecoder(CrossDecoder):
    """A CrossDecoder whose positions are not learned."""

    def __init__(self, config: CrossDecoderConfig) -> None:
        super().__init__(config)
        self.embed_positions = FixedPositions(config.hidden_size)


class FastConformerLM(EncoderDecoderLM):
    """The model of both families. own: the decoder's config.

    Raises ModelNotSupportedError for heads that share keys, or of another size than divides the
    hidden size: no checkpoint of these families has them.
    """

    def __init__(
        self,
        config: Any,
        own: Any,
        new_decoder: Callable[[CrossDecoderConfig], Any] = CrossDecoder,
    ) -> None:
        heads, size, bias = own.num_attention_heads, own.hidden_size, own.attention_bias
        if own.num_key_value_heads != heads or own.head_dim * heads != size:
            raise ModelNotSupportedError(
                f"this model has {own.num_key_value_heads} key heads of {own.head_dim} channels "
                f"for {heads} heads and hidden_size {size}; supported are as many key heads as "
                "heads, of hidden_size / heads channels"
            )
        decoder = CrossDecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=size,
            intermediate_size=own.intermediate_size,
            num_layers=own.num_hidden_layers,
            num_heads=heads,
            encoder_size=size,
            encoder_positions=0,
            num_positions=own.max_position_embeddings,
            activation=own.hidden_act,
            norms_first=True,
            bias=bias,
            key_bias=bias,
            out_bias=bias,
            is_tied=config.tie_word_embeddings,
        )
        super().__init__(decoder, new_decoder)
        self.cross = replace(self.cross, longest=None)  # sounds have any length
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size), requires_grad=False)
        self.encoder = TransformersTower(config.encoder_config)
        self.proj: Linear | None = None
        table = get_checkpoint_conversion_mapping(config.model_type)
        self._renamings = list(table or ())

    def _map_weights(self, config: Any) -> None:
        """Maps the checkpoint's names, once all layers are there."""
        copies = (r"^proj_out\.weight",) if config.tie_word_embeddings else ()
        self.weight_map = WeightMap(self, renames=NAMES, ignored=(*NOT_READ, *copies))

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model. Names of the authors' own checkpoints are those of transformers first,
        by its table."""
        name, _ = rename_source_key(key, self._renamings, [])
        return super().weight_targets(name)

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiplies by the output head, which has a bias, [N, hidden] -> [N, vocab] float32."""
        return super().logits(hidden) + self.head_bias

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the encoder for one sound after the other."""
        return [self._heard(item) for item in items]

    def _heard(self, item: MediaInput) -> Tensor:
        """Returns the encoder's output of frames [1, F, mels], [L, hidden]. The last frame is
        masked, as in transformers."""
        device = self.decoder.embed_tokens.weight.device
        frames = item.tensors["input_features"].to(device, self.encoder.dtype)
        mask = item.tensors["attention_mask"].to(device)
        states: Tensor = self.encoder.inner(frames, attention_mask=mask).last_hidden_state
        states = states[0, : item.num_tokens]
        return states if self.proj is None else self.proj(states)


class CanaryForConditionalGeneration(FastConformerLM):
    """transformers' class of the same name. Raises ModelNotSupportedError where the decoder has
    another size than the encoder."""

    def __init__(self, config: Any) -> None:
        own, encoder_size = config.decoder_config, config.encoder_config.hidden_size
        if own.hidden_size != encoder_size:
            raise ModelNotSupportedError(
                f"hidden_size {own.hidden_size} of the decoder of this model must be that of its "
                f"encoder, {encoder_size}"
            )
        super().__init__(config, own, CanaryDecoder)
        self._map_weights(config)


class CohereAsrForConditionalGeneration(FastConformerLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config)
        self.proj = Linear(config.encoder_config.hidden_size, config.hidden_size, bias=True)
        self._map_weights(config)
