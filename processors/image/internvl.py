"""The image processor of InternVL: tiles of an image as patch rows, and the markers around them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor, PixelKernels

from .decode import DecodedImage, ImageDecoder, ImageHeader
from .embedded import check_names
from .options import ImageOptions
from .patches import Patchifier
from .tiles import item_tiles, num_tiles, num_tiles_at_most, resolve_tiles, tiles

# The texts of tokens, under their names in tokenizer_config.json.
TOKENS = {
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
}
MAX_SIDE = 4096  # pixels of a tile


class TileProcessor(MediaProcessor):
    """Decodes images for families whose images are several tiles; safe for use from several
    threads."""

    kind = "image"

    def __init__(self, pixels: ImageOptions) -> None:
        """pixels: options of every tile."""
        self._decoder = ImageDecoder()
        self._patches = Patchifier(pixels)

    def use_kernels(self, kernels: PixelKernels) -> None:
        """See MediaProcessor."""
        self._patches.use_kernels(kernels)

    def close(self) -> None:
        """Ends the decoder processes."""
        self._decoder.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """Decodes bytes, a PIL image, a numpy array or a torch tensor to an upright RGB image."""
        return self._decoder.decode(source, limits)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size, which `count_tokens` needs, without decoding pixels."""
        return self._decoder.peek(source, limits)


class InternVLImageProcessor(TileProcessor):
    """Processes an image into tiles; safe for use from several threads.

    checkpoint: provides preprocessor_config.json, the markers in tokenizer_config.json, and the
    sizes of the vision tower. options: the engine's mm_processor_kwargs; one image may set
    min_patches, max_patches and crop_to_patches, transformers' names of the bounds of the number of
    tiles. Raises ConfigError and CheckpointError for wrong options.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        pixels, side = tower_of(checkpoint.config)
        self.options = resolve_tiles(pixels, side, checkpoint.preprocessor, options)
        texts = special_texts(checkpoint, TOKENS)
        self.token = texts["context_image_token"]
        self._start, self._end = texts["start_image_token"], texts["end_image_token"]
        self.markers = (self.token,)
        super().__init__(self.options.pixels)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] of all tiles and the grid of patches
        (tiles, rows, columns). key: hash of the item's digest and all resolved options."""
        own = item_tiles(self.options, options)
        rows = np.concatenate([self._patches.rows(tile) for tile in tiles(item.image, own)])
        text = f"{type(self).__qualname__}\0{own!r}\0{item.digest}"
        key = blake2b(text.encode(), digest_size=20).hexdigest()
        return self._input(num_tiles(item.size, own), torch.from_numpy(rows), key)

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        own = item_tiles(self.options, options)
        return num_tiles(item.size, own) * own.tokens_of_tile

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns the placeholders of an image of this size between its markers."""
        return self._text(self.count_tokens(item, options))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. Raises MediaError unless the embeddings are those of whole tiles."""
        check_names(self.kind, options)
        one = self.options.tokens_of_tile
        found = num_tokens // one
        if num_tokens % one or not found or (grid is not None and grid != self._grid(found)):
            raise MediaError(
                f"image_embeds has {num_tokens} rows and the grid {grid}; an image of this model "
                f"has {one} rows for each tile, and needs no grid"
            )
        return self._input(found, None, "")

    def largest(self, max_tokens: int) -> MediaInput | None:
        """Builds an image of the most tiles, reduced to max_tokens; None if not even one fits."""
        one = self.options.tokens_of_tile
        found = min(num_tiles_at_most(self.options), max_tokens // one)
        if not found:
            return None
        pixels = self.options.pixels
        patches = torch.zeros(found * one * pixels.merge_size**2, 3 * pixels.patch_size**2)
        return self._input(found, patches, "largest-image")

    def _input(self, tiles_of_item: int, pixels: torch.Tensor | None, key: str) -> MediaInput:
        num_tokens = tiles_of_item * self.options.tokens_of_tile
        return MediaInput(
            kind=self.kind,
            tensors={} if pixels is None else {"pixels": pixels},
            num_tokens=num_tokens,
            key=key,
            grid_thw=self._grid(tiles_of_item),
            prompt_text=self._text(num_tokens),
        )

    def _grid(self, tiles_of_item: int) -> tuple[int, int, int]:
        side = self.options.side // self.options.pixels.patch_size
        return tiles_of_item, side, side

    def _text(self, num_tokens: int) -> str:
        return f"{self._start}{self.token * num_tokens}{self._end}"


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


def special_texts(checkpoint: Checkpoint, defaults: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of each token that `defaults` names: the tokenizer's own, else that of the
    published models.

    Raises CheckpointError for one that is no text.
    """
    tokenizer = checkpoint.read_json("tokenizer_config.json")
    extra = tokenizer.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **tokenizer}
    found = {name: named.get(name, text) for name, text in defaults.items()}
    for name, text in found.items():
        if isinstance(text, Mapping):  # an AddedToken
            found[name] = text = text.get("content")
        if not isinstance(text, str) or not text:
            raise CheckpointError(f"tokenizer_config.json has {name} = {text!r:.80}; give its text")
    return found
