"""LFM2-VL: LFM2, dense or with experts, with images in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Grid, media_grid, to_device
from mmdeploy_llm.weights.map import WeightMap

from .text import RENAMES as TEXT_RENAMES
from .text import Lfm2ForCausalLM
from .tower import Projector, SiglipTower

TEXTS = ("lfm2", "lfm2_moe")
# From the published names, and from those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^vision_tower\.(vision_model\.)?", "visual."),
    (r"^multi_modal_projector\.layer_norm\.", "projector.norm."),
    (r"^multi_modal_projector\.linear_", "projector.fc"),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.self_attn\.", r"\1.attn."),
    *TEXT_RENAMES,
)
UNUSED = (r"^(model\.)?vision_tower\.(vision_model\.)?head\.",)  # of the tower's pre-training


class Lfm2VlForConditionalGeneration(Lfm2ForCausalLM):
    """transformers' Lfm2VlForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        """Raises ModelNotSupportedError for the text models and towers of other families."""
        for part, kind, known in (
            ("text", config.text_config.model_type, TEXTS),
            ("vision", config.vision_config.model_type, ("siglip2_vision_model",)),
        ):
            if kind not in known:
                raise ModelNotSupportedError(
                    f"the {part} model {kind!r} of this LFM2-VL checkpoint is not supported, only "
                    f"{' and '.join(known)}"
                )
        super().__init__(config.text_config, is_tied=config.tie_word_embeddings)
        self.visual = SiglipTower(config.vision_config, config.downsample_factor)
        self.projector = Projector(config)
        ignored = UNUSED if self.lm_head else (*UNUSED, "^lm_head")
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all tiles go through the tower together."""
        device = self.model.embed_tokens.weight.device
        pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in items])
        grids = [grid for item in items for grid in tile_grids(item)]
        rows = self.projector(self.visual(pixels, grids))
        return torch.split(rows, [item.num_tokens for item in items])


def tile_grids(item: MediaInput) -> Sequence[Grid]:
    """Returns the grids of an image: one of all its tiles, and that of its thumbnail, whose rows
    and columns of patches are in the tensor "thumbnail"."""
    thumbnail = item.tensors.get("thumbnail")
    if thumbnail is None:
        return (media_grid(item),)
    height, width = thumbnail.tolist()
    return media_grid(item), (1, height, width)
