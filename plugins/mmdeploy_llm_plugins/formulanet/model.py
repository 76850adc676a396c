"""PP-FormulaNet: transformers' tower with its projector, and the decoder of MBart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.pp_formulanet.modeling_pp_formulanet import PPFormulaNetVisionModel

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    RENAMES,
    CrossDecoderConfig,
    EncoderDecoderLM,
    embedding_scale,
)
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

from .image import num_cells

OFFSET = 2  # rows of the table before the first position
NAMES = ((r"^model\.encoder\.", "encoder.inner."), (r"^model\.decoder\.", "decoder."))


class PPFormulaNetForConditionalGeneration(EncoderDecoderLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        text, vision = config.text_config, config.vision_config
        super().__init__(
            CrossDecoderConfig(
                vocab_size=text.vocab_size,
                hidden_size=text.d_model,
                intermediate_size=text.decoder_ffn_dim,
                num_layers=text.decoder_layers,
                num_heads=text.decoder_attention_heads,
                encoder_size=text.d_model,
                encoder_positions=num_cells(vision),
                num_positions=text.max_position_embeddings,
                position_offset=OFFSET,
                activation=text.activation_function,
                embedding_scale=embedding_scale(text.scale_embedding, text.d_model),
                norms_first=True,
                is_tied=False,
            )
        )
        self.encoder = TransformersTower(vision, PPFormulaNetVisionModel)
        self.weight_map = WeightMap(self, renames=(*NAMES, *RENAMES))

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the tower for all pictures, which have the same size."""
        device = self.decoder.embed_tokens.weight.device
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        cells: Tensor = self.encoder.inner(pixels.to(device, self.encoder.dtype)).pooler_output
        return list(cells.unbind())
