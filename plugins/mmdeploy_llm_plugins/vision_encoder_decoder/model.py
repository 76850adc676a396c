"""transformers' VisionEncoderDecoderModel with a decoder of TrOCR or MBart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Linear
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
HEAD = r"^decoder\.(lm_head|output_projection)\."
NAMES = (
    (r"^encoder\.", "encoder.inner."),
    (HEAD, "lm_head."),
    (r"^decoder\.model\.decoder\.", "decoder."),
)
# Of towers in checkpoints, and in transformers since it has written them anew.
STORED = r"^encoder\.encoder\.layer\.(\d+)\."
ANEW = (
    *(
        (rf"{STORED}attention\.attention\.{old}\.", rf"encoder.layers.\1.attention.{new}_proj.")
        for old, new in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    (rf"{STORED}attention\.output\.dense\.", r"encoder.layers.\1.attention.o_proj."),
    (rf"{STORED}intermediate\.dense\.", r"encoder.layers.\1.mlp.fc1."),
    (rf"{STORED}output\.dense\.", r"encoder.layers.\1.mlp.fc2."),
    (STORED, r"encoder.layers.\1."),
)
COMPUTED = r"\.relative_position_index$"
POOLER = r"^encoder\.pooler\."  # whose result is not read


def decoder_config(config: Any) -> CrossDecoderConfig:
    """Returns the options of the decoder. Raises ModelNotSupportedError for one of another
    family."""
    own, tower = config.decoder, config.encoder
    if own.model_type not in ("trocr", "mbart"):
        raise ModelNotSupportedError(
            f"decoders of trocr and mbart are supported after a tower, found {own.model_type!r:.40}"
        )
    if not getattr(own, "use_learned_position_embeddings", True):
        raise ModelNotSupportedError(
            "this decoder computes its positions (use_learned_position_embeddings = false); those "
            "that have learned them are supported"
        )
    is_mbart = own.model_type == "mbart"
    length = num_cells(tower)
    size = getattr(own, "cross_attention_hidden_size", None) or own.d_model
    return CrossDecoderConfig(
        vocab_size=own.vocab_size,
        hidden_size=own.d_model,
        intermediate_size=own.decoder_ffn_dim,
        num_layers=own.decoder_layers,
        num_heads=own.decoder_attention_heads,
        encoder_size=size,
        encoder_positions=length,
        num_positions=own.max_position_embeddings,
        position_offset=OFFSET,
        activation=own.activation_function,
        embedding_scale=embedding_scale(own.scale_embedding, own.d_model),
        norms_first=is_mbart,
        has_embedding_norm=is_mbart or own.layernorm_embedding,
        is_tied=own.tie_word_embeddings,
    )


class VisionEncoderDecoderModel(EncoderDecoderLM):
    """transformers' class of the same name."""

    def __init__(self, config: Any) -> None:
        made = decoder_config(config)
        super().__init__(made)
        self.encoder = TransformersTower(config.encoder)
        ignored = [POOLER, COMPUTED, *([HEAD] if made.is_tied else [])]
        pooler = getattr(self.encoder.inner, "pooler", None)
        if pooler is not None and next(pooler.parameters(), None) is not None:
            self.encoder.inner.pooler = None
        own, tower = config.decoder, config.encoder
        self.enc_to_dec_proj: Linear | None = None
        is_asked = getattr(own, "cross_attention_hidden_size", None) is None
        if tower.hidden_size != own.d_model and is_asked:
            self.enc_to_dec_proj = Linear(tower.hidden_size, own.d_model, bias=True)
        anew = ANEW if hasattr(self.encoder.inner, "layers") else ()
        renames = (*anew, *NAMES, *RENAMES)
        self.weight_map = WeightMap(self, renames=renames, ignored=tuple(ignored))

    def encode(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Runs the tower for all pictures, which have the same size."""
        device = self.decoder.embed_tokens.weight.device
        pixels = torch.cat([item.tensors["pixel_values"] for item in items])
        cells = self.encoder.inner(pixels.to(device, self.encoder.dtype)).last_hidden_state
        cells = cells if self.enc_to_dec_proj is None else self.enc_to_dec_proj(cells)
        return list(cells.unbind())
