"""TIPSv2: sinusoidal positions of texts, whose vector is the mean of their tokens, and
transformers' own vision tower, whose first token has the vector of an image."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.tipsv2.modeling_tipsv2 import Tipsv2VisionModel

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.weights.map import Target, WeightMap
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower
from mmdeploy_llm_plugins.transformers_parts.weights import WeightTable

from .models import RENAMES, TwoTowers
from .text import TextTower

IMAGES = re.compile(r"^vision_(encoder|model)\.")
# Of published files; transformers' own names are CLIP's.
NAMES = (
    (r"^text_encoder\.ln_final\.", "text.norm."),
    (r"^text_encoder\.transformer\.resblocks\.", "text.layers."),
    (r"^text_encoder\.", "text."),
    (r"^(text\.layers\.\d+)\.ln_", r"\1.norm"),
    (r"^(text\.layers\.\d+)\.attn\.in_proj_", r"\1.self_attn.qkv_proj."),
    (r"^(text\.layers\.\d+)\.attn\.", r"\1.self_attn."),
    (r"^(text\.layers\.\d+\.mlp)\.c_fc\.", r"\1.fc1."),
    (r"^(text\.layers\.\d+\.mlp)\.c_proj\.", r"\1.fc2."),
    *RENAMES,
)
IGNORED = (r"^temperature$",)  # it divides cosines, and keeps their order
LONGEST = 10_000  # tokens of the longest wave of the positions, over 2 pi


class TipsText(TextTower):
    """A text tower whose positions are computed, and whose tokens are scaled."""

    table: Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        del self.position_embedding
        shape = config.max_position_embeddings, config.hidden_size
        self.register_buffer("table", torch.empty(shape), persistent=False)
        self.scale = math.sqrt(config.hidden_size) if config.scale_sqrt_depth else 1.0

    def init_buffers(self, device: torch.device) -> None:
        """Computes sines of all positions, followed by cosines, with a zero in an odd size."""
        num, size = self.table.shape
        step = math.log(LONGEST) / (size // 2 - 1)
        rates = torch.exp(torch.arange(size // 2).float() * -step)
        angles = torch.arange(num).float()[:, None] * rates
        waves = torch.cat([angles.sin(), angles.cos(), torch.zeros(num, size % 2)], 1)
        self.table = waves.to(device)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """See TextTower."""
        return x * self.scale + self.table[positions].to(x.dtype)


class Tipsv2Model(TwoTowers):
    """transformers' Tipsv2Model."""

    is_bidirectional = True
    cache = ()  # nothing is kept between steps
    default_pooling = "mean"
    text_tower = TipsText
    vision: TransformersTower

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.text_config.hidden_size, project_bias=None)
        self.vision = TransformersTower(config.vision_config, Tipsv2VisionModel)
        self.weight_map = WeightMap(self, renames=NAMES, ignored=IGNORED)
        self._of_images = WeightTable(self.vision.inner, "vision.inner.", {})

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model. transformers knows the names of its tower in published files."""
        own, is_of_images = IMAGES.subn("", key)
        return self._of_images.targets(own) if is_of_images else super().weight_targets(key)

    def vectors(self, pixels: Sequence[Tensor], items: Sequence[MediaInput]) -> Tensor:
        """See TwoTowers."""
        made = self.vision.inner(torch.stack(list(pixels)).to(self.vision.dtype))
        out: Tensor = made.pooler_output
        return out
