"""Whisper: transformers' encoder of mel frames, and a decoder that attends to its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    RENAMES,
    CrossDecoderConfig,
    EncoderDecoderLM,
)
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

NAMES = (
    (r"^model\.encoder\.", "encoder.inner."),
    (r"^model\.decoder\.", "decoder."),
    (r"^proj_out\.", "lm_head."),
)


class WhisperForConditionalGeneration(EncoderDecoderLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            CrossDecoderConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                intermediate_size=config.decoder_ffn_dim,
                num_layers=config.decoder_layers,
                num_heads=config.decoder_attention_heads,
                encoder_size=config.d_model,
                encoder_positions=config.max_source_positions,
                num_positions=config.max_target_positions,
                activation=config.activation_function,
                # transformers has scale_embedding in the config, and reads it in neither part.
                norms_first=True,
                has_embedding_norm=False,
                key_bias=False,
                is_tied=config.tie_word_embeddings,
            )
        )
        self.encoder = TransformersTower(config, WhisperEncoder)
        copies = (r"^proj_out\.",) if config.tie_word_embeddings else ()
        self.weight_map = WeightMap(self, renames=(*NAMES, *RENAMES), ignored=copies)

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the encoder for all sounds, which have the same number of frames."""
        device = self.decoder.embed_tokens.weight.device
        frames = torch.cat([item.tensors["input_features"] for item in items])
        out = self.encoder.inner(frames.to(device, self.encoder.dtype))
        return list(out.last_hidden_state.unbind())
