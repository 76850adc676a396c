"""UltraVBert: UltraBERT with images, whose tokens have a norm of their own. The vector of a prompt
is the mean of its tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmdeploy_llm.layers import RMSNorm
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.bert.euro import IGNORED, EuroBertModel

from .modern import TILES, Tiles

NAMES = (
    (r"^model\.(?=(vision_model|connector|text_model)\.)", ""),
    *TILES,
    (r"^connector\.norm\.", "image_norm."),
    (r"^text_model\.", "model."),
)


class UltraVBertModel(Tiles, EuroBertModel):
    """transformers' UltraVBertModel and UltraVBertForMaskedLM, which gives vectors here too."""

    def __init__(self, config: Any) -> None:
        EuroBertModel.__init__(self, config.text_config)
        self.add_tower(config, self.hidden_size)
        self.image_norm = RMSNorm(self.hidden_size, config.text_config.rms_norm_eps)
        self.weight_map = WeightMap(self, renames=NAMES, ignored=IGNORED)

    def projected(self, states: Tensor) -> Tensor:
        """See Tiles."""
        out: Tensor = self.image_norm(super().projected(states))
        return out
