"""The image processor of InternVL: tiles of an image as patch rows, and the markers around them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.image.tiling.tile_processor import SquareTileProcessor
from mmdeploy_llm_processors.image.tiling.tiles import (
    TileOptions,
    item_tiles,
    num_tiles,
    of_tiles,
    resolve_tiles,
    tile_grid,
    tiles,
)
from PIL import Image

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import DecodedImage, ImageHeader

# The texts of tokens, under their names in tokenizer_config.json.
TOKENS = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
}
MAX_SIDE = 4096  # pixels of a tile


class InternVLImageProcessor(SquareTileProcessor[TileOptions]):
    """Processes an image into tiles; safe for use from several threads.

    checkpoint: provides preprocessor_config.json, the markers in tokenizer_config.json, and the
    sizes of the vision tower. options: the engine's mm_processor_kwargs; one image may set
    min_patches, max_patches and crop_to_patches, transformers' names of the bounds of the number of
    tiles. Raises ConfigError and CheckpointError for wrong options.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        pixels, side = tower_of(checkpoint.config)
        super().__init__(resolve_tiles(pixels, side, checkpoint.preprocessor, options), options)
        texts = special_texts(checkpoint, TOKENS)
        self.token = texts["context_image_token"]
        self._start, self._end = texts["start_image_token"], texts["end_image_token"]
        self.markers = (self.token,)

    def of_tiles(self, count: int, *, may_raise: bool) -> TileOptions:
        """See SquareTileProcessor."""
        return of_tiles(self.options, count, self._given, may_raise=may_raise)

    def own_options(self, given: Mapping[str, Any]) -> TileOptions:
        """See item_tiles."""
        return item_tiles(self.options, given)

    def num_tiles(self, size: tuple[int, int], options: TileOptions) -> int:
        """Returns the number of tiles of an image of (width, height), the thumbnail included."""
        return num_tiles(size, options)

    def shown_size(
        self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Returns the (width, height) of the tiles of an image of this size together."""
        own = self.own_options(options)
        columns, rows = tile_grid(item.size, own)
        return columns * own.side, rows * own.side

    def tiles(self, image: Image.Image, options: TileOptions) -> Iterable[np.ndarray]:
        """Returns the tiles line by line, then the thumbnail."""
        return tiles(image, options)

    def text(self, num_tiles: int) -> str:
        """Returns the placeholders of all tiles between the markers."""
        return f"{self._start}{self.token * self.tokens_of_tile * num_tiles}{self._end}"


def tower_of(config: Any) -> tuple[ImageOptions, int]:
    """Returns default options with the tower's patches, and the side of its images in pixels.

    Raises CheckpointError for sizes that no tower can have.
    """
    vision = config.vision_config
    sides: list[Any] = [getattr(vision, name, None) for name in ("image_size", "patch_size")]
    sides = [side[0] if isinstance(side, (list, tuple)) and side else side for side in sides]
    ratio: Any = getattr(config, "downsample_ratio", None)
    is_ratio = isinstance(ratio, (int, float)) and 1e-3 < ratio <= 1
    if all(type(side) is int and 0 < side <= MAX_SIDE for side in sides) and is_ratio:
        image, patch = sides
        merge = round(1 / ratio)
        pixels = ImageOptions(min_pixels=1, max_pixels=1, patch_size=patch, merge_size=merge)
        if image % pixels.factor == 0:
            return pixels, image
    raise CheckpointError(
        f"config.json has image_size, patch_size = {sides!r:.80} and downsample_ratio = "
        f"{ratio!r:.80}; the patches of a side must be a multiple of 1 / downsample_ratio, and a "
        f"side at most {MAX_SIDE} pixels"
    )
