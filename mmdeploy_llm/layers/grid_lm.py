"""Vision-language models whose media are grids of patches: encoding and M-RoPE positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from mmdeploy_llm.layers.transfer import to_device
from mmdeploy_llm.request import MediaInput, MediaSpan

from .decoder import CausalLM, DecoderLayer, NewLayer
from .decoder_config import DecoderConfig
from .vision import Grid, grid_positions


class GridLM(CausalLM):
    """A decoder with M-RoPE positions, for media that are grids of patches. A plugin's model
    subclasses it, builds its vision tower, sets `weight_map` and adds `encode`.

    merge_size: patches that become one token, along each side.
    """

    def __init__(
        self, decoder: DecoderConfig, new_layer: NewLayer = DecoderLayer, *, merge_size: int
    ) -> None:
        """new_layer: see Decoder."""
        super().__init__(decoder, new_layer)
        self.merge_size = merge_size

    @abstractmethod
    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encodes the patches of all media, concatenated, [P, patch_dim] -> [M, media size]. grids:
        patches of each in (time, rows, columns)."""

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, media size] for each item; calls `encode` once for all."""
        device = self.model.embed_tokens.weight.device
        # Large tensors may be on the device already; small ones are on the host.
        pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in items])
        rows = self.encode(pixels, [media_grid(item) for item in items])
        return torch.split(rows, [item.num_tokens for item in items])

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor:
        """Returns M-RoPE positions [3, num_tokens], as transformers' get_rope_index does."""
        return grid_positions(num_tokens, [grid for span in media for grid in self.grids_of(span)])

    def grids_of(self, span: MediaSpan) -> Sequence[tuple[int, Grid, float]]:
        """Returns the token grids of a media item for grid_positions: (offset of the first token,
        tokens in time, height and width, positions between two frames)."""
        frames, height, width = media_grid(span.item)
        grid = frames, height // self.merge_size, width // self.merge_size
        return ((span.offset, grid, 1.0),)


def media_grid(item: MediaInput) -> Grid:
    """Returns the grid of patches of a media item."""
    assert item.grid_thw is not None, "this family's processors set a grid"
    return item.grid_thw
