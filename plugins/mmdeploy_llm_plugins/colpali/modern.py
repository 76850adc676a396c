"""ColModernVBert: ModernBERT with images, and a projection. A block of patches, one after the other
in memory, becomes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import LayerNorm, Linear, PlainVisionEncoder
from mmdeploy_llm_plugins.bert.model import EncoderModel
from mmdeploy_llm_plugins.bert.modern import RENAMES, modern_config

from .late import LateInteraction, patch_rows
from .tower import TOWER_NAMES, plain_tower

TILES = (
    (r"^vision_model\.(vision_model\.)?", "visual."),
    (r"^connector\.modality_projection\.", "projector."),
    (r"^visual\.post_layernorm\.", "tower_norm."),
    *TOWER_NAMES,
)
NAMES = (*TILES, (r"^text_model\.", ""), *RENAMES)


class Tiles(nn.Module):
    """The tower for tiles, which a model derives from besides the class of its encoder."""

    def add_tower(self, config: Any, size: int) -> None:
        """config: with that of the tower. size: of the encoder's embeddings."""
        vision, factor = config.vision_config, config.pixel_shuffle_factor
        self.patch = vision.patch_size
        self.visual = PlainVisionEncoder(plain_tower(vision, merge_size=factor))
        self.tower_norm = LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.merged_size = vision.hidden_size * factor**2
        self.projector = Linear(self.merged_size, size, bias=False)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all tiles go through the tower together."""
        device = self.projector.weight.device
        pixels = patch_rows(items, self.patch, self.visual.merge_size, device)
        states = self.tower_norm(self.visual(pixels))
        rows = self.projected(states.reshape(-1, self.merged_size))
        return torch.split(rows, [item.num_tokens for item in items])

    def projected(self, states: Tensor) -> Tensor:
        """Returns the embeddings of blocks of patches, [M, merged_size] -> [M, hidden]."""
        out: Tensor = self.projector(states)
        return out


class ColModernVBertForRetrieval(Tiles, LateInteraction, EncoderModel):
    """transformers' ColModernVBertForRetrieval."""

    def __init__(self, config: Any) -> None:
        vlm = config.vlm_config
        EncoderModel.__init__(self, modern_config(vlm.text_config), ())
        self.add_tower(vlm, self.hidden_size)
        self.add_vectors(config, self.hidden_size, NAMES)
