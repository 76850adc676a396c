"""Whisper: an encoder of mel frames, and a decoder that attends to its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    RENAMES,
    CrossDecoderConfig,
    EncoderDecoderLM,
)

from .encoder import Encoder

NAMES = (
    (r"^model\.(encoder|decoder)\.", r"\1."),
    (r"^proj_out\.", "lm_head."),
    (r"^(encoder\.layers\.\d+)\.(fc[12])\.", r"\1.mlp.\2."),
    (r"^(encoder\.layers\.\d+)\.final_layer_norm\.", r"\1.mlp_norm."),
    (r"^(encoder\.layers\.\d+)\.self_attn_layer_norm\.", r"\1.self_norm."),
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
        self.encoder = Encoder(config)
        copies = (r"^proj_out\.",) if config.tie_word_embeddings else ()
        self.weight_map = WeightMap(self, renames=(*NAMES, *RENAMES), ignored=copies)

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the encoder for all sounds, which have the same number of frames."""
        states: Tensor = self.encoder(torch.cat([item.tensors["input_features"] for item in items]))
        return list(states.unbind())
