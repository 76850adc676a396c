"""InternVL: a plain vision transformer on tiles of an image, pixel shuffle, an MLP, and a Qwen
decoder.

image  --> tiles of 448 x 448 pixels and a thumbnail    mmdeploy_llm_processors.image.tiling.tiles
tile   --> 32 x 32 patches --> 16 x 16 blocks of 2 x 2  InternViT, pixel shuffle
block  --> one token of the decoder                     Projector

I: tiles of all images, P: patches of all tiles, M: tokens of all tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import (
    MLP,
    CausalLM,
    LayerNorm,
    PlainVisionEncoder,
    to_device,
    vision_activation,
)
from mmdeploy_llm.weights.map import WeightMap

from .text import decoder_config
from .tower import merge_size, tower_config

# From the published names, and from those of transformers' modules, to ours.
RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^multi_modal_projector\.layer_norm\.", "projector.norm."),
    (r"^multi_modal_projector\.linear_", "projector.mlp.fc"),
    (r"^vision_tower\.embeddings\.patch_embeddings\.projection\.", "visual.patch_embed.proj."),
    (r"^vision_tower\.embeddings\.cls_token$", "visual.class_token"),
    (r"^vision_tower\.embeddings\.position_embeddings$", "visual.positions"),
    (r"^vision_tower\.layernorm\.", "norm."),
    (r"^vision_tower\.encoder\.layer\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.lambda_", r"\1.scale"),
    (r"^(visual\.blocks\.\d+)\.layernorm_before\.", r"\1.norm1."),
    (r"^(visual\.blocks\.\d+)\.layernorm_after\.", r"\1.norm2."),
    (r"^(visual\.blocks\.\d+)\.attention\.projection_layer\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.attention\.", r"\1.attn."),
)
# Buffers of older checkpoints, and a token of the tower's pre-training.
IGNORED = (r"rotary_emb\.inv_freq$", r"\.mask_token$")
PROJECTOR_EPS = 1e-5  # not in the config


class Projector(nn.Module):
    """Merges merge x merge patches into one token of the decoder."""

    def __init__(self, config: Any, merge: int) -> None:
        super().__init__()
        self.merged_size = config.vision_config.hidden_size * merge**2
        size = config.text_config.hidden_size
        self.norm = LayerNorm(self.merged_size, PROJECTOR_EPS)
        activation = vision_activation(config.projector_hidden_act)
        self.mlp = MLP(self.merged_size, size, size, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Patch features [P, vision size] in blocks -> [M, hidden]."""
        out: Tensor = self.mlp(self.norm(x.reshape(-1, self.merged_size)))
        return out


class InternVLForConditionalGeneration(CausalLM):
    """transformers' InternVLForConditionalGeneration. Raises ModelNotSupportedError for text models
    and options of the tower that it does not have."""

    def __init__(self, config: Any) -> None:
        tower, merge = tower_config(config), merge_size(config)
        # Published configs leave the outer flag at its default, True; the text config's decides.
        text = config.text_config
        is_tied = config.tie_word_embeddings and getattr(text, "tie_word_embeddings", False)
        decoder = decoder_config(text, is_tied=is_tied)
        super().__init__(decoder)
        self.visual = PlainVisionEncoder(tower)
        has_norm = not config.vision_config.use_mean_pooling
        self.norm = LayerNorm(tower.size, tower.norm_eps) if has_norm else None
        self.projector = Projector(config, merge)
        ignored = (*IGNORED, r"(^|\.)lm_head\.") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all tiles go through the tower together."""
        device = self.model.embed_tokens.weight.device
        x = self.visual(torch.cat([to_device(item.tensors["pixels"], device) for item in items]))
        rows = self.projector(x if self.norm is None else self.norm(x))
        return torch.split(rows, [item.num_tokens for item in items])
