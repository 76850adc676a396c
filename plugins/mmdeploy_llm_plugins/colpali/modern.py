"""ColModernVBert: ModernBERT with images, and a projection. A block of patches, one after the other
in memory, becomes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import LayerNorm, Linear, PlainVisionEncoder
from mmdeploy_llm_plugins.bert.model import EncoderModel
from mmdeploy_llm_plugins.bert.modern import RENAMES, modern_config

from .late import LateInteraction, patch_rows
from .tower import TOWER_NAMES, plain_tower

NAMES = (
    (r"^vision_model\.(vision_model\.)?", "visual."),
    (r"^connector\.modality_projection\.", "projector."),
    (r"^visual\.post_layernorm\.", "tower_norm."),
    *TOWER_NAMES,
    (r"^text_model\.", ""),
    *RENAMES,
)


class ColModernVBertForRetrieval(LateInteraction, EncoderModel):
    """transformers' ColModernVBertForRetrieval."""

    def __init__(self, config: Any) -> None:
        vlm = config.vlm_config
        vision, factor = vlm.vision_config, vlm.pixel_shuffle_factor
        EncoderModel.__init__(self, modern_config(vlm.text_config), ())
        self.patch = vision.patch_size
        self.visual = PlainVisionEncoder(plain_tower(vision, merge_size=factor))
        self.tower_norm = LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.merged_size = vision.hidden_size * factor**2
        self.projector = Linear(self.merged_size, self.hidden_size, bias=False)
        self.add_vectors(config, self.hidden_size, NAMES)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all tiles go through the tower together."""
        device = self.projector.weight.device
        pixels = patch_rows(items, self.patch, self.visual.merge_size, device)
        states = self.tower_norm(self.visual(pixels))
        rows = self.projector(states.reshape(-1, self.merged_size))
        return torch.split(rows, [item.num_tokens for item in items])
