"""LateInteraction: a decoder or encoder that gives a vector for each token, compared by MaxSim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Linear, to_device
from mmdeploy_llm.weights.map import Replacement, WeightMap

Renames = Sequence[tuple[str, Replacement]]
PREFIX = (r"^vlm\.(model\.)?", "")  # of all keys but those of the projection
OF_VECTORS = {"lm_head": None, "is_embedder": True, "default_pooling": "tokens"}
IGNORED = (r"(^|\.)lm_head\.", r"inv_freq$", r"\.position_ids$")


class LateInteraction(nn.Module):
    """The part that all have; a model derives from it and from the class of its own decoder."""

    embedding_proj_layer: Linear
    weight_map: WeightMap

    def add_vectors(self, config: Any, size: int, renames: Renames) -> None:
        """Makes a model that generates into one that gives vectors. size: of its states. renames:
        of its keys without a prefix."""
        for name, value in OF_VECTORS.items():
            setattr(self, name, value)
        self.embedding_proj_layer = Linear(size, config.embedding_dim, bias=True)
        self.weight_map = WeightMap(self, renames=(PREFIX, *renames), ignored=IGNORED)

    def embedding(self, states: Tensor) -> Tensor:
        """Returns the vectors of tokens [N, size], of length 1."""
        return F.normalize(self.embedding_proj_layer(states), dim=-1)


def patch_rows(items: Sequence[MediaInput], patch: int, merge: int, device: Any) -> Tensor:
    """Returns the patches [P, channels * patch * patch] of the tiles of all items, tile by tile, in
    blocks of merge x merge."""
    tiles = torch.cat([item.tensors["pixel_values"].flatten(0, -4) for item in items])
    num, channels, height, width = tiles.shape
    size = patch * merge
    cells = to_device(tiles, device).view(
        num, channels, height // size, merge, patch, width // size, merge, patch
    )
    return cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * patch * patch)
