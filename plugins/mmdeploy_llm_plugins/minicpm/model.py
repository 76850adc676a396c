"""MiniCPM-V 4.6: the decoder of Qwen3.5 with images in slices of any size. Tokens of an image have
the positions of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Grid, media_grid, to_device
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.qwen.qwen35 import NOT_NEEDED, Qwen35ForCausalLM
from mmdeploy_llm_plugins.qwen.text import RENAMES as TEXT_RENAMES

from .tower import SIDE, Merger, MiniCPMTower

TEXTS = ("qwen3_5_text", "qwen3_5_moe_text")
# From the published names, which are those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.merger\.mlp\.0\.", "merger."),
    (r"^model\.vision_tower\.", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.", "visual.positions."),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^visual\.vit_merger\.layer_norm1\.", "visual.window_merger.norm."),
    (r"^visual\.vit_merger\.", "visual.window_merger."),
    (r"^((?:visual\.window_)?merger)\.linear_", r"\1.mlp.fc"),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.(?:blocks\.\d+|window_merger))\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.(?:blocks\.\d+|window_merger))\.self_attn\.", r"\1.attn."),
    *TEXT_RENAMES,
)


class MiniCPMV46ForConditionalGeneration(Qwen35ForCausalLM):
    """transformers' MiniCPMV4_6ForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        """Raises ModelNotSupportedError for other mergers and text models of other families."""
        check_parts(config)
        super().__init__(config.text_config, is_tied=config.tie_word_embeddings)
        self.visual = MiniCPMTower(config.vision_config)
        self.merger = Merger(config.vision_config.hidden_size, config.text_config.hidden_size)
        ignored = NOT_NEEDED if self.lm_head else (*NOT_NEEDED, "^lm_head")
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all slices go through the tower together."""
        device = self.model.embed_tokens.weight.device
        pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in items])
        # An engine has one processor, so all its items are merged alike.
        merge = math.isqrt(pixels.shape[0] // sum(item.num_tokens for item in items))
        grids = [grid for item in items for grid in tile_grids(item)]
        rows = self.merger(self.visual(pixels, grids, merge))
        return torch.split(rows, [item.num_tokens for item in items])


def tile_grids(item: MediaInput) -> Sequence[Grid]:
    """Returns the grids of an item: those in its tensor "tiles" [grids, 3] (slices of one size,
    rows and columns of patches), or its own, if it has no slices of another size."""
    tiles = item.tensors.get("tiles")
    if tiles is None:
        return (media_grid(item),)
    return [(num, rows, columns) for num, rows, columns in tiles.tolist()]


def check_parts(config: Any) -> None:
    """Raises ModelNotSupportedError for what no published model has."""
    vision = config.vision_config
    found = {
        "text_config.model_type": (config.text_config.model_type, TEXTS),
        "merge_kernel_size": (tuple(config.merge_kernel_size), ((SIDE, SIDE),)),
        "merger_times": (config.merger_times, (1,)),
        "vision_config.window_kernel_size": (tuple(vision.window_kernel_size), ((SIDE, SIDE),)),
        "vision_config.insert_layer_id": (
            vision.insert_layer_id,
            range(vision.num_hidden_layers),
        ),
    }
    for name, (value, known) in found.items():
        if value not in known:
            raise ModelNotSupportedError(
                f"{name} = {value!r:.80} of this MiniCPM-V checkpoint is not supported, only "
                f"{', '.join(map(str, known))}"
            )
