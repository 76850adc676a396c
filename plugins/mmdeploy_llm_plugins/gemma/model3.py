"""Gemma 3 with images: SigLIP on images of one size, an average over blocks of patches, and the
decoder of version 3, where the tokens of an image attend to each other in both directions.

image --> 64 x 64 patches             the processor, plugins/mmdeploy_llm_plugins/gemma/image3.py
patch --> one token for 4 x 4 patches SigLIP and the average of a block
token --> an embedding of the decoder Projector

P: patches of all images, M: tokens of all images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import (
    LayerNorm,
    Linear,
    PlainVisionConfig,
    PlainVisionEncoder,
    ZeroCenteredRMSNorm,
    to_device,
)
from mmdeploy_llm.weights.map import Target, WeightMap

from .text import RENAMES as TEXT_RENAMES
from .text import GemmaForCausalLM

TRANSPOSED = "multi_modal_projector.mm_input_projection_weight"
# From the published names, and from those of transformers' modules, to ours.
RENAMES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(model\.)?language_model\.(model\.)?", "model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^vision_tower\.(vision_model\.)?", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.weight$", "visual.positions"),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^visual\.post_layernorm\.", "projector.tower_norm."),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.self_attn\.", r"\1.attn."),
    (r"^multi_modal_projector\.mm_soft_emb_norm\.", "projector.norm."),
    (r"^multi_modal_projector\.mm_input_projection_weight$", "projector.linear.weight"),
    *TEXT_RENAMES,
)
UNUSED = r"(^|\.)vision_tower\.(vision_model\.)?head\."  # of the tower's pre-training


class Projector(nn.Module):
    """Averages the patches of a block and turns them into one embedding of the decoder."""

    def __init__(self, config: Any, merge: int) -> None:
        """merge: patches along a side of a block."""
        super().__init__()
        vision = config.vision_config
        self.num_merged = merge**2
        self.tower_norm = LayerNorm(vision.hidden_size, vision.layer_norm_eps)
        self.norm = ZeroCenteredRMSNorm(vision.hidden_size, vision.layer_norm_eps)
        self.linear = Linear(vision.hidden_size, config.text_config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Patch features [P, vision size] in blocks -> [M, hidden]."""
        blocks = self.tower_norm(x).view(-1, self.num_merged, x.shape[1])
        out: Tensor = self.linear(self.norm(blocks.mean(1)))
        return out


class Gemma3ForConditionalGeneration(GemmaForCausalLM):
    """transformers' Gemma3ForConditionalGeneration. Raises ModelNotSupportedError for text models
    and towers of other families, and for images that do not fit them."""

    def __init__(self, config: Any) -> None:
        check_parts(config)
        tower = tower_config(config)
        super().__init__(config.text_config, is_tied=config.tie_word_embeddings)
        self.visual = PlainVisionEncoder(tower)
        self.projector = Projector(config, tower.merge_size)
        ignored = [UNUSED, *(() if self.lm_head else (r"(^|\.)lm_head\.",))]
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, hidden] for each item; all images, and the crops of those that are
        cropped, go through the tower together."""
        device = self.model.embed_tokens.weight.device
        pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in items])
        rows = self.projector(self.visual(pixels))
        return torch.split(rows, [item.num_tokens for item in items])

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map. The projection is stored with its axes swapped."""
        targets = super().weight_targets(key)
        if not targets or not key.endswith(TRANSPOSED):
            return targets
        return [Target(name=target.name, transpose=True) for target in targets]


def check_parts(config: Any) -> None:
    """Raises ModelNotSupportedError for parts of other families, for a placeholder without an
    embedding, and for images that are longer than the window of local layers: their tokens would
    not all see each other there."""
    text = config.text_config
    for part, kind, known in (
        ("text", text.model_type, "gemma3_text"),
        ("vision", config.vision_config.model_type, "siglip_vision_model"),
    ):
        if kind != known:
            raise ModelNotSupportedError(
                f"the {part} model {kind!r} of this Gemma 3 checkpoint is not supported, only "
                f"{known!r}"
            )
    if not 0 <= config.image_token_id < text.vocab_size:
        raise ModelNotSupportedError(
            f"image_token_index = {config.image_token_id} of this Gemma 3 checkpoint is not "
            f"supported; it must be below vocab_size = {text.vocab_size}"
        )
    has_windows = "sliding_attention" in text.layer_types
    if has_windows and config.mm_tokens_per_image > text.sliding_window:
        raise ModelNotSupportedError(
            f"mm_tokens_per_image = {config.mm_tokens_per_image} of this Gemma 3 checkpoint is not "
            f"supported; it must be at most sliding_window = {text.sliding_window}"
        )


def tower_config(config: Any) -> PlainVisionConfig:
    """Converts the vision config; blocks of its patches become tokens. Raises
    ModelNotSupportedError if the patches of an image do not divide into its tokens."""
    vision, num_tokens = config.vision_config, config.mm_tokens_per_image
    side, tokens_side = vision.image_size // vision.patch_size, math.isqrt(num_tokens)
    if tokens_side**2 != num_tokens or side % tokens_side or vision.image_size % vision.patch_size:
        raise ModelNotSupportedError(
            f"mm_tokens_per_image = {num_tokens} of this Gemma 3 checkpoint is not supported for "
            f"image_size = {vision.image_size} and patch_size = {vision.patch_size}; the patches "
            "of a side must be a multiple of the tokens of a side"
        )
    return PlainVisionConfig(
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_side=side,
        merge_size=side // tokens_side,
        patch_size=vision.patch_size,
        num_channels=vision.num_channels,
        norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
    )
