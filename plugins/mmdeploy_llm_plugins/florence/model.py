"""Florence-2: a DaViT tower, whose features an encoder reads together with the question, and BART's
decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bart.modeling_bart import BartEncoder
from transformers.models.florence2.modeling_florence2 import Florence2VisionBackbone

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Embedding, LayerNorm, Linear
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.encoder_decoder.decoder import (
    NORM_EPS,
    RENAMES,
    CrossDecoderConfig,
    EncoderDecoderLM,
    embedding_scale,
)
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

OFFSET = 2  # rows of BART's table before the first position
NAMES = (
    (r"^model\.vision_tower\.", "vision.inner."),
    (r"^model\.multi_modal_projector\.image_position_embed\.", "projector."),
    (r"^model\.multi_modal_projector\.", "projector."),
    (r"^model\.language_model\.shared\.", "decoder.embed_tokens."),
    (r"^model\.language_model\.encoder\.", "encoder.inner."),
    (r"^model\.language_model\.", ""),
)
# Copies of the shared embeddings, and what is computed.
IGNORED = (r"coder\.embed_tokens\.", r"^lm_head\.", r"\.pos_idx_to_embed$")


class Projector(nn.Module):
    """Makes tokens of the tower's cells: one for each, after one for their mean."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        size, rows = vision.embed_dim[-1], vision.max_position_embeddings
        self.row_embeddings = Embedding(rows, size // 2)
        self.column_embeddings = Embedding(rows, size - size // 2)
        self.image_projection = Linear(size, vision.projection_dim)
        self.image_proj_norm = LayerNorm(vision.projection_dim, NORM_EPS)

    def forward(self, cells: Tensor) -> Tensor:
        """[images, size, height, width] -> [images, 1 + height * width, projection size]."""
        height, width = cells.shape[-2:]
        rows = self.row_embeddings(torch.arange(height, device=cells.device))
        columns = self.column_embeddings(torch.arange(width, device=cells.device))
        pair = columns.expand(height, -1, -1), rows[:, None].expand(-1, width, -1)
        x = cells.permute(0, 2, 3, 1) + torch.cat(pair, -1)
        x = x.flatten(1, 2)
        # The position of the first frame, the only one: sines of 0 and cosines of 0.
        x[..., 1::2] += 1
        x = torch.cat([x.mean(1, keepdim=True), x], 1)
        out: Tensor = self.image_proj_norm(self.image_projection(x))
        return out


class Florence2ForConditionalGeneration(EncoderDecoderLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        text = config.text_config
        ties = config.tie_word_embeddings, text.tie_word_embeddings
        if text.model_type != "bart" or not all(ties):
            raise ModelNotSupportedError(
                "of Florence-2 only the form with BART and one table of embeddings for encoder, "
                f"decoder and head is supported, found {text.model_type!r:.40} with "
                f"tie_word_embeddings = {ties!r:.40}, of the whole and of text_config"
            )
        super().__init__(
            CrossDecoderConfig(
                vocab_size=text.vocab_size,
                hidden_size=text.d_model,
                intermediate_size=text.decoder_ffn_dim,
                num_layers=text.decoder_layers,
                num_heads=text.decoder_attention_heads,
                encoder_size=text.d_model,
                encoder_positions=text.max_position_embeddings,
                num_positions=text.max_position_embeddings,
                position_offset=OFFSET,
                activation=text.activation_function,
                embedding_scale=embedding_scale(text.scale_embedding, text.d_model),
            )
        )
        self.vision = TransformersTower(config.vision_config, Florence2VisionBackbone)
        self.projector = Projector(config)
        self.encoder = TransformersTower(text, BartEncoder)
        del self.encoder.inner.embed_tokens  # the decoder's are the same
        self.weight_map = WeightMap(self, renames=(*NAMES, *RENAMES), ignored=IGNORED)

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the tower for all pictures, and the encoder for each with its question."""
        device = self.decoder.embed_tokens.weight.device
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        cells = self.vision.inner(pixels.to(device, self.vision.dtype))
        pictures = self.projector(cells.last_hidden_state)
        return [self._read(*pair) for pair in zip(pictures, items, strict=True)]

    def _read(self, picture: Tensor, item: MediaInput) -> Tensor:
        """Runs the encoder over the tokens of a picture and its question."""
        ids = item.tensors["input_ids"].to(picture.device)
        words = self.decoder.embed_tokens(ids) * self.decoder.scale
        x = torch.cat([picture.to(words.dtype), words])[None]
        out: Tensor = self.encoder.inner(inputs_embeds=x).last_hidden_state[0]
        return out
