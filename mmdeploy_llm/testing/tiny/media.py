"""How transformers takes the media of a model: its arguments for images and videos, made from the
inputs of a media processor.

Pixels come in blocks of the patches that become a token; the functions here put them into the
orders that transformers' models read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.request import MediaInput, MediaSpan

NAMES = {"image": "pixel_values", "video": "pixel_values_videos"}
KINDS = {"image": 1, "video": 2, "audio": 3}  # in transformers' mm_token_type_ids


def patch_size(config: Any) -> int:
    """Returns the pixels along a side of a patch; some configs give both sides."""
    size = config.vision_config.patch_size
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def merge_size(config: Any) -> int:
    """Returns the patches along a side of the block that becomes a token, from the field of the
    config that most families have."""
    return int(config.vision_config.spatial_merge_size)


def media_kinds(ids: Tensor, media: Sequence[MediaSpan]) -> Tensor:
    """Returns 1 for tokens of an image, 2 of a video, 3 of a sound, without markers, and 0 for
    text. ids, result: [1, tokens]."""
    kinds = torch.zeros_like(ids)
    for span in media:
        for start, end in span.runs:
            kinds[0, start:end] = KINDS[span.item.kind]
    return kinds


def sound_inputs(media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the tensors of sounds, which are named as the model's arguments: those of several are
    filled with zeros at their ends to one size."""
    items = [span.item.tensors for span in media if span.item.kind == "audio"]
    found = {}
    for name in items[0] if items else ():
        values = [tensors[name] for tensors in items]
        sizes = [max(edges) for edges in zip(*(value.shape[1:] for value in values), strict=True)]
        found[name] = torch.cat([_filled(value, sizes) for value in values])
    return found


def _filled(value: Tensor, sizes: Sequence[int]) -> Tensor:
    filled = value.new_zeros((len(value), *sizes))
    filled[(slice(None), *map(slice, value.shape[1:]))] = value
    return filled


def grid_inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the arguments of a model whose images and videos are grids of patches,
    ordered as the processor orders them."""
    inputs = {"mm_token_type_ids": media_kinds(ids, media), **sound_inputs(media)}
    for kind, pixels in NAMES.items():
        items = [span.item for span in media if span.item.kind == kind]
        if items:
            inputs[pixels] = torch.cat([item.tensors["pixels"] for item in items])
            inputs[f"{kind}_grid_thw"] = torch.tensor([item.grid_thw for item in items])
    return inputs


def lines(item: MediaInput, merge: int) -> tuple[Sequence[Tensor], Tensor]:
    """Returns the patches of each frame [rows * columns, values] line by line, channels last, and
    their (column, row)."""
    frames, height, width = item.grid_thw or (1, 1, 1)
    blocks = item.tensors["pixels"].view(
        frames, height // merge, width // merge, merge, merge, 3, -1
    )
    found = blocks.permute(0, 1, 3, 2, 4, 6, 5).reshape(frames, height * width, -1)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return found.unbind(), torch.stack([columns, rows], -1).view(-1, 2)


def tiles(item: MediaInput, merge: int, patch: int) -> Tensor:
    """Returns the tiles of an image, [tiles, channels, height, width]."""
    num_tiles, height, width = item.grid_thw or (1, 1, 1)
    rows = item.tensors["pixels"].view(
        num_tiles, height // merge, width // merge, merge, merge, -1, patch, patch
    )  # blocks of patches, which a tile has line by line
    found = rows.permute(0, 5, 1, 3, 6, 2, 4, 7)
    return found.reshape(num_tiles, -1, height * patch, width * patch)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaForm:
    """How transformers takes the images and videos of a family, and how its prompts hold them.

    inputs: (transformers' config, token ids [1, tokens], media) -> the model's arguments for media,
        as its processor would make them; with decoder_input_ids, all of them.
    merge_size: (config) -> the patches along a side of the block that becomes a token.
    has_tiles: an image may be several tiles, and the config names no markers around it.
    has_text_between: text stands between the frames of a video, or the tiles of an image.
    prompt: (config, grids, seed) -> token ids and spans, for a family whose media stand outside of
        its prompts; None: they stand in them.
    generate: (model, arguments of its forward, options of generate) -> the answer's tokens, for a
        family whose own generate changes its arguments; None: that is called.
    video_token: the kind whose placeholder token a video has in transformers' prompts.
    """

    inputs: Callable[[Any, Tensor, Sequence[MediaSpan]], dict[str, Tensor]] = grid_inputs
    merge_size: Callable[[Any], int] = merge_size
    has_tiles: bool = False
    has_text_between: bool = False
    video_token: str = "video"
    prompt: (
        Callable[[Any, Sequence[tuple[int, int, int]], int], tuple[list[int], list[MediaSpan]]]
        | None
    ) = None
    generate: Callable[[Any, dict[str, Tensor], dict[str, Any]], Tensor] | None = None
