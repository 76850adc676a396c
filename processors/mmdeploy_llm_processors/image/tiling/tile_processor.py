"""Processors of images that are several tiles: what all share, and what those share whose tiles are
squares of one size."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from PIL import Image

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor, PixelKernels
from mmdeploy_llm.media import DecodedImage, ImageDecoder, ImageHeader, Patchifier
from mmdeploy_llm_processors.image.budget import AUTO_TOKENS, too_few
from mmdeploy_llm_processors.image.embedded import check_names
from mmdeploy_llm_processors.image.options import ImageOptions


class SquareOptions(Protocol):
    """Resolved options of a SquareTileProcessor. pixels: of each tile. side: pixels along a side of
    a tile, a multiple of `pixels.factor`."""

    @property
    def pixels(self) -> ImageOptions: ...
    @property
    def side(self) -> int: ...
    @property
    def most_tiles(self) -> int:
        """The largest number of tiles of an image."""


Options = TypeVar("Options", bound=SquareOptions)


class TileProcessor(MediaProcessor):
    """Decodes images for families whose images are several tiles; safe for use from several
    threads."""

    kind = "image"
    auto_tokens = AUTO_TOKENS

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
        """Decodes bytes, a PIL image, a numpy array or a torch tensor to an upright RGB image; a
        Drawing is drawn with no more pixels than all tiles have."""
        return self._decoder.decode(source, limits, fit=self._enough)

    def _enough(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of an image with no more pixels than the largest one's tiles."""
        scale = min(1.0, math.sqrt(self.most_pixels / (height * width)))
        return max(1, round(height * scale)), max(1, round(width * scale))

    @property
    def most_pixels(self) -> float:
        """Pixels of all tiles of the largest image; without a bound by default."""
        return math.inf

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size, which `count_tokens` needs, without decoding pixels."""
        return self._decoder.peek(source, limits)

    def key_of(self, item: DecodedImage, options: object) -> str:
        """Returns the hash of the item's digest and all resolved options."""
        text = f"{type(self).__qualname__}\0{options!r}\0{item.digest}"
        return blake2b(text.encode(), digest_size=20).hexdigest()


class SquareTileProcessor(TileProcessor, Generic[Options]):
    """Processes an image into square tiles of one size. A family sets `token` and `markers`, and
    says which tiles an image has and what text they have.

    options: the engine's. given: names of those that the user has set. bounds: names of options
    that bound the number of tiles.
    """

    bounds: ClassVar[frozenset[str]] = frozenset({"max_patches"})

    def __init__(self, options: Options, given: Collection[str] = ()) -> None:
        super().__init__(options.pixels)
        self.options = options
        self._given = frozenset(given)
        if self.bounds & self._given:  # the user's bound is what "auto" stands for
            self.auto_tokens = options.most_tiles * self.tokens_of_tile

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See MediaProcessor: the number of tiles is bounded."""
        count = tokens // self.tokens_of_tile
        if not count:
            raise too_few(tokens, self.tokens_of_tile, "the tokens of one tile of this model")
        limited = copy.copy(self)
        limited.options = self.of_tiles(count, may_raise=may_raise)
        return limited

    def of_tiles(self, count: int, *, may_raise: bool) -> Options:
        """Returns the options of images of at most so many tiles. See with_budget. Raises
        ConfigError by default: a family whose images are one tile has no choice."""
        raise ConfigError(
            f"image_tokens cannot be kept to: {type(self).__name__} (plugin "
            f"{type(self).__module__}) does not implement of_tiles; leave the option out"
        )

    @abstractmethod
    def own_options(self, given: Mapping[str, Any]) -> Options:
        """Returns the options of one image. Raises MediaError for wrong ones."""

    @abstractmethod
    def num_tiles(self, size: tuple[int, int], options: Options) -> int:
        """Returns the number of tiles of an image of (width, height)."""

    @abstractmethod
    def tiles(self, image: Image.Image, options: Options) -> Iterable[np.ndarray]:
        """Returns the tiles of an RGB image, each uint8 [side, side, 3]."""

    @abstractmethod
    def text(self, num_tiles: int) -> str:
        """Returns the text of an image of so many tiles, with its placeholders."""

    @property
    def tokens_of_tile(self) -> int:
        """Embeddings of one tile."""
        return int((self.options.side // self.options.pixels.factor) ** 2)

    @property
    def most_pixels(self) -> float:
        """Pixels of all tiles of the largest image."""
        return float(self.options.most_tiles * self.options.side**2)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] of all tiles and the grid of patches
        (tiles, rows, columns). key: hash of the item's digest and all resolved options."""
        own = self.own_options(options)
        rows = np.concatenate([self._patches.rows(tile) for tile in self.tiles(item.image, own)])
        num = self.num_tiles(item.size, own)
        return self._input(num, torch.from_numpy(rows), self.key_of(item, own))

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        return self.num_tiles(item.size, self.own_options(options)) * self.tokens_of_tile

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns the text of an image of this size."""
        return self.text(self.num_tiles(item.size, self.own_options(options)))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. Raises MediaError unless the embeddings are those of whole tiles."""
        check_names(self.kind, options)
        one = self.tokens_of_tile
        found = num_tokens // one
        if num_tokens % one or not found or (grid is not None and grid != self._grid(found)):
            raise MediaError(
                f"image_embeds has {num_tokens} rows and the grid {grid}; an image of this model "
                f"has {one} rows for each tile, and needs no grid"
            )
        return self._input(found, None, "")

    def largest(self, max_tokens: int) -> MediaInput | None:
        """Builds an image of the most tiles, reduced to max_tokens; None if not even one fits."""
        one, pixels = self.tokens_of_tile, self.options.pixels
        found = min(self.options.most_tiles, max_tokens // one)
        if not found:
            return None
        patches = torch.zeros(found * one * pixels.merge_size**2, 3 * pixels.patch_size**2)
        return self._input(found, patches, "largest-image")

    def _input(self, num_tiles: int, pixels: torch.Tensor | None, key: str) -> MediaInput:
        return MediaInput(
            kind=self.kind,
            tensors={} if pixels is None else {"pixels": pixels},
            num_tokens=num_tiles * self.tokens_of_tile,
            key=key,
            grid_thw=self._grid(num_tiles),
            prompt_text=self.text(num_tiles),
        )

    def _grid(self, num_tiles: int) -> tuple[int, int, int]:
        side = self.options.side // self.options.pixels.patch_size
        return num_tiles, side, side
