"""Models of two towers: texts and images become vectors of one space.

An image is a prompt of one token, whose media embedding is its vector already; all other prompts
go through the text tower, and the state of a prompt's last token becomes its vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import Linear, to_device
from mmdeploy_llm.weights.map import Target, WeightMap

from .text import TextTower
from .vision import ClassTower, FlexibleTower, QueryTower

RENAMES = (
    (r"^text_model\.embeddings\.", "text."),
    (r"^text_model\.encoder\.layers\.", "text.layers."),
    (r"^text_model\.final_layer_norm\.", "text.norm."),
    (r"^text_model\.head\.", "project."),
    (r"^text_projection\.", "project."),
    (r"^visual_projection\.", "project_image."),
    (r"^(text\.layers\.\d+)\.layer_norm", r"\1.norm"),
    (r"^vision_model\.embeddings\.class_embedding$", "vision.class_token"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "vision.patch_embed.proj."),
    (r"^vision_model\.pre_layrnorm\.", "vision.first_norm."),
    (r"^vision_model\.post_layernorm\.", "vision.norm."),
    (r"^vision_model\.encoder\.layers\.(\d+)\.layer_norm", r"vision.blocks.\1.norm"),
    (r"^vision_model\.encoder\.layers\.(\d+)\.self_attn\.out_proj", r"vision.blocks.\1.attn.proj"),
    (r"^vision_model\.encoder\.layers\.(\d+)\.self_attn\.", r"vision.blocks.\1.attn."),
    (r"^vision_model\.encoder\.layers\.", "vision.blocks."),
    (r"^vision_model\.head\.attention\.in_proj_", "vision.head.in_proj."),
    (r"^vision_model\.head\.attention\.", "vision.head."),
    (r"^vision_model\.head\.layernorm\.", "vision.head.norm."),
    (r"^vision_model\.head\.", "vision.head."),
)
TABLE = (r"^vision_model\.embeddings\.position_embedding\.weight$", "vision.positions")
FLEXIBLE_TABLE = (TABLE[0], "vision.pos_embed.weight")
# Buffers of old checkpoints, and what only the loss of the training reads.
IGNORED = (r"\.position_ids$", r"^logit_(scale|bias)$")


class TwoTowers(nn.Module):
    """The part that all have. A family adds its vision tower and projections."""

    is_embedder = True
    default_pooling = "last"
    text_tower: ClassVar[type[TextTower]] = TextTower
    vision: nn.Module
    weight_map: WeightMap

    def __init__(self, config: Any, size: int, *, project_bias: bool | None) -> None:
        """size: of the vectors. project_bias: None where the texts' states are their vectors."""
        super().__init__()
        text = config.text_config
        self.text = self.text_tower(text)
        self.project: nn.Module = nn.Identity()
        if project_bias is not None:
            self.project = Linear(text.hidden_size, size, bias=project_bias)
        self.num_layers, self.hidden_size = text.num_hidden_layers, size
        self.num_kv_heads = text.num_attention_heads
        self.head_dim = text.hidden_size // text.num_attention_heads
        self.max_positions = text.max_position_embeddings

    @property
    def text_layers(self) -> Sequence[nn.Module]:
        """See hooks.Model."""
        return tuple(self.text.layers)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See hooks.Model."""
        return self.weight_map.targets(key)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns the vectors of texts that end at each token, [T, size], and of images."""
        return inputs.merge_media(self.project(self.text(inputs)))

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns the vector of each image, [1, size]."""
        device = self.text.token_embedding.weight.device
        pixels = [to_device(item.tensors["pixel_values"][0], device) for item in items]
        return torch.split(self.vectors(pixels, items), 1)

    def vectors(self, pixels: Sequence[Tensor], items: Sequence[MediaInput]) -> Tensor:
        """Returns what the vision tower makes of the images, [I, size]."""
        out: Tensor = self.vision(pixels)
        return out


class CLIPModel(TwoTowers):
    """transformers' CLIPModel, whose text tower is causal."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.projection_dim, project_bias=False)
        self.vision = ClassTower(config.vision_config)
        self.project_image = Linear(config.vision_config.hidden_size, config.projection_dim)
        self.weight_map = WeightMap(self, renames=(TABLE, *RENAMES), ignored=IGNORED)

    def vectors(self, pixels: Sequence[Tensor], items: Sequence[MediaInput]) -> Tensor:
        """See TwoTowers."""
        out: Tensor = self.project_image(super().vectors(pixels, items))
        return out


class SiglipModel(TwoTowers):
    """transformers' SiglipModel, also of SigLIP 2 for images of one size. A text is filled with
    padding to the length of its training, and the tokens attend to it in both directions."""

    is_bidirectional = True
    cache = ()  # nothing is kept between steps

    def __init__(self, config: Any) -> None:
        super().__init__(config, text_size(config), project_bias=True)
        self.text_length = self.max_positions
        self.vision = QueryTower(config.vision_config)
        self.weight_map = WeightMap(self, renames=(TABLE, *RENAMES), ignored=IGNORED)


class Siglip2Model(TwoTowers):
    """transformers' Siglip2Model, which keeps the shape of an image."""

    is_bidirectional = True
    cache = ()

    def __init__(self, config: Any) -> None:
        super().__init__(config, text_size(config), project_bias=True)
        self.text_length = self.max_positions
        self.vision = FlexibleTower(config.vision_config)
        self.weight_map = WeightMap(self, renames=(FLEXIBLE_TABLE, *RENAMES), ignored=IGNORED)

    def vectors(self, pixels: Sequence[Tensor], items: Sequence[MediaInput]) -> Tensor:
        """See TwoTowers. The rows of an image end with padding, which is left out."""
        shapes = [tuple(item.tensors["spatial_shapes"][0].tolist()) for item in items]
        rows = [
            rows[: height * width] for rows, (height, width) in zip(pixels, shapes, strict=True)
        ]
        out: Tensor = self.vision(rows, shapes)
        return out


def text_size(config: Any) -> int:
    """Returns the size of the vectors of SigLIP's texts, which is that of its images."""
    text = config.text_config
    return int(text.projection_size or text.hidden_size)
