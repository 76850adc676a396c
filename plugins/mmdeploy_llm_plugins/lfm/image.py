"""The image processor of LFM2-VL: a small image is resized to as many tokens as a budget allows, a
large one to a grid of square tiles, which its small version follows."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from mmdeploy_llm_processors.image.budget import too_few, within
from mmdeploy_llm_processors.image.embedded import check_names
from mmdeploy_llm_processors.image.options import ImageOptions, apart
from mmdeploy_llm_processors.image.patches import resize
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.image.tiling.tile_processor import TileProcessor
from mmdeploy_llm_processors.image.tiling.tiles import (
    MAX_TILES,
    TileOptions,
    grid_tiles,
    resolve_pixels,
    tile_grid,
)

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm.media import DecodedImage, ImageHeader

# The texts of tokens, under their names in tokenizer_config.json.
TOKENS = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
HALF = (0.5, 0.5, 0.5)
FLAGS = ("do_image_splitting", "use_thumbnail")
MAX_COUNTS = {
    "min_tiles": MAX_TILES,
    "max_tiles": MAX_TILES,
    "min_image_tokens": 2**16,
    "max_image_tokens": 2**16,
}
OF_ITEMS = (*FLAGS, *MAX_COUNTS)  # what one prompt or image can set
OF_FILES = (*OF_ITEMS, "tile_size", "max_pixels_tolerance")


@dataclass(frozen=True, slots=True, kw_only=True)
class LfmOptions:
    """Resolved options, under transformers' names.

    pixels: of each tile; its patch_size and merge_size are the tower's and the projector's.
    min_image_tokens, max_image_tokens: bounds of the tokens of an image that is not split, or of
        the small version of one that is.
    max_pixels_tolerance: an image is split if its area is more than so many times that of
        max_image_tokens.
    """

    pixels: ImageOptions
    do_image_splitting: bool = True
    use_thumbnail: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    max_tokens: int | None = None  # of the budget; holds for the small version of any shape

    @property
    def tokens_of_tile(self) -> int:
        """Embeddings of one tile."""
        return int((self.tile_size // self.pixels.factor) ** 2)

    @property
    def most_tokens(self) -> int:
        """Embeddings of an image at most."""
        if not self.do_image_splitting or self.max_tiles == 1:
            return self.max_image_tokens
        tiles = self.max_tiles * self.tokens_of_tile
        return max(self.max_image_tokens, tiles + self.use_thumbnail * self.max_image_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan for an image: columns and rows of tiles, and (height, width) of its small version,
    which stands alone if there is one tile; None: there is none."""

    columns: int
    rows: int
    small: tuple[int, int] | None

    @property
    def num_tiles(self) -> int:
        """Number of tiles, without the small version."""
        return self.columns * self.rows if self.columns * self.rows > 1 else 0


class LfmImageProcessor(TileProcessor):
    """Processes an image into tiles and a thumbnail; safe for use from several threads.

    checkpoint: provides preprocessor_config.json, the markers in tokenizer_config.json, and the
    sizes of the vision tower. options: the engine's mm_processor_kwargs; one image may set those in
    OF_ITEMS. Raises ConfigError and CheckpointError for wrong options. Images are resized by
    Pillow, where transformers needs torchvision, whose results differ slightly.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self.options = resolve(checkpoint, options)
        self._texts = special_texts(checkpoint, TOKENS)
        self.token = self._texts["image_token"]
        self.markers = (self.token,)
        file = checkpoint.read_json("processor_config.json")
        self._has_markers = file.get("use_image_special_tokens", True) is not False
        self._given = frozenset(options)
        if {"max_tiles", "max_image_tokens"} & self._given:
            self.auto_tokens = self.options.most_tokens
        super().__init__(self.options.pixels)

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See MediaProcessor: the number of tiles is bounded; if two of them with the small version
        are too many, an image is not split."""
        limited = copy.copy(self)
        limited.options = with_tokens(self.options, tokens, self._given, may_raise=may_raise)
        return limited

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] of all tiles, the grid of patches
        (tiles, rows, columns), and in `thumbnail` rows and columns of the small version if there
        are both. key: hash of the item's digest and all resolved options."""
        own, kernels = item_options(self.options, options), self._patches.kernels
        layout = layout_of(item.size, own)
        parts: list[np.ndarray] = []
        if layout.num_tiles:
            parts += grid_tiles(
                item.image, layout.columns, layout.rows, own.tile_size, self.options.pixels
            )
        if layout.small is not None:
            parts.append(resize(item.image, *layout.small, self.options.pixels, kernels))
        rows = np.concatenate([self._patches.rows(part) for part in parts])
        return self._input(layout, own, torch.from_numpy(rows), self.key_of(item, own))

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        own = item_options(self.options, options)
        return self._num_tokens(layout_of(item.size, own), own)

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns the placeholders of an image of this size, with the marks of its tiles."""
        own = item_options(self.options, options)
        return self._text(layout_of(item.size, own), own)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. The embeddings are those of one tile; a grid is not needed."""
        check_names(self.kind, options)
        merge = self.options.pixels.merge_size
        if grid is not None and grid[0] * grid[1] * grid[2] != num_tokens * merge**2:
            raise MediaError(
                f"image_embeds has {num_tokens} rows and the grid {grid}; an image of this model "
                f"has one row for every {merge**2} patches, and needs no grid"
            )
        return MediaInput(
            kind=self.kind,
            tensors={},
            num_tokens=num_tokens,
            key="",
            grid_thw=grid,
            prompt_text=self._marked(self.token * num_tokens),
        )

    def largest(self, max_tokens: int) -> MediaInput | None:
        """Builds an image of as many tiles as max_tokens allow; None if not even one fits."""
        own = self.options
        side = own.tile_size // own.pixels.patch_size
        num_tiles = min(-(-own.most_tokens // own.tokens_of_tile), max_tokens // own.tokens_of_tile)
        if not num_tiles:
            return None
        pixels = torch.zeros(num_tiles * side**2, 3 * own.pixels.patch_size**2)
        return MediaInput(
            kind=self.kind,
            tensors={"pixels": pixels},
            num_tokens=num_tiles * own.tokens_of_tile,
            key="largest-image",
            grid_thw=(num_tiles, side, side),
        )

    def _input(self, layout: Layout, own: LfmOptions, pixels: torch.Tensor, key: str) -> MediaInput:
        patch, side = own.pixels.patch_size, own.tile_size
        tensors, grid = {"pixels": pixels}, (layout.num_tiles, side // patch, side // patch)
        if layout.small is not None:
            rows, columns = (length // patch for length in layout.small)
            if layout.num_tiles:
                tensors["thumbnail"] = torch.tensor([rows, columns])
            else:
                grid = (1, rows, columns)
        return MediaInput(
            kind=self.kind,
            tensors=tensors,
            num_tokens=self._num_tokens(layout, own),
            key=key,
            grid_thw=grid,
            prompt_text=self._text(layout, own),
        )

    def _num_tokens(self, layout: Layout, own: LfmOptions) -> int:
        return layout.num_tiles * own.tokens_of_tile + _tokens(layout.small, own)

    def _text(self, layout: Layout, own: LfmOptions) -> str:
        small = self.token * _tokens(layout.small, own)
        if not layout.num_tiles:
            return self._marked(small)
        tile, text = self.token * own.tokens_of_tile, ""
        for number in range(layout.num_tiles):
            row, column = divmod(number, layout.columns)
            text += f"<|img_row_{row + 1}_col_{column + 1}|>" * self._has_markers + tile
        if layout.small is not None:
            text += self._texts["image_thumbnail_token"] * self._has_markers + small
        return self._marked(text)

    def _marked(self, text: str) -> str:
        if not self._has_markers:
            return text
        return f"{self._texts['image_start_token']}{text}{self._texts['image_end_token']}"


def _tokens(size: tuple[int, int] | None, options: LfmOptions) -> int:
    """Returns the tokens of an image of (height, width)."""
    factor = options.pixels.factor
    return 0 if size is None else (size[0] // factor) * (size[1] // factor)


def layout_of(size: tuple[int, int], options: LfmOptions) -> Layout:
    """Plans an image of (width, height). Raises MediaError for one so long that its small version
    has more patches than the model was made for."""
    width, height = size
    small = small_size(height, width, options)
    if options.max_tokens is not None:
        small = within(small, options.pixels.factor, options.max_image_tokens)
    columns = rows = 1
    can_split = options.do_image_splitting and options.max_tiles > 1
    if can_split and is_large(height, width, options):
        tiles = TileOptions(
            pixels=options.pixels,
            side=options.tile_size,
            min_tiles=options.min_tiles,
            max_tiles=options.max_tiles,
        )
        columns, rows = tile_grid(size, tiles)
    if columns * rows > 1 and not options.use_thumbnail:
        return Layout(columns=columns, rows=rows, small=None)
    allowed = options.max_image_tokens
    allowed = max(allowed, options.tokens_of_tile) if options.do_image_splitting else allowed
    if _tokens(small, options) > allowed:
        raise MediaError(
            f"an image of {width} x {height} pixels is too long: at the smallest size of its short "
            f"side it has {_tokens(small, options)} tokens, {allowed} are allowed; crop or pad it"
        )
    return Layout(columns=columns, rows=rows, small=small)


def is_large(height: int, width: int, options: LfmOptions) -> bool:
    """Whether an image has too many pixels for one tile."""
    factor, patch = options.pixels.factor, options.pixels.patch_size
    sides = (max(patch, round(length / factor) * factor) for length in (height, width))
    area = options.max_image_tokens * factor**2
    return math.prod(sides) > area * options.max_pixels_tolerance


def small_size(height: int, width: int, options: LfmOptions) -> tuple[int, int]:
    """Returns (height, width) of the image that is not split: multiples of the factor, with the
    tokens within the bounds and nearly the same aspect. Source: transformers' smart_resize."""
    factor = options.pixels.factor
    low, high = (
        count * factor**2 for count in (options.min_image_tokens, options.max_image_tokens)
    )
    new_height, new_width = (max(factor, round(n / factor) * factor) for n in (height, width))
    if new_height * new_width > high:
        shrink = math.sqrt(height * width / high)
        new_height, new_width = (
            max(factor, math.floor(n / shrink / factor) * factor) for n in (height, width)
        )
    elif new_height * new_width < low:
        grow = math.sqrt(low / (height * width))
        new_height, new_width = (math.ceil(n * grow / factor) * factor for n in (height, width))
    return new_height, new_width


def resolve(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> LfmOptions:
    """Resolves the options: the checkpoint's file, overridden by the user's.

    Raises CheckpointError for a wrong value in the file, ConfigError for an unknown name or wrong
    value of the user's.
    """
    vision = checkpoint.config.vision_config
    default = ImageOptions(
        min_pixels=1,
        max_pixels=1,
        patch_size=getattr(vision, "patch_size", 16),
        merge_size=getattr(checkpoint.config, "downsample_factor", 2),
        resample=2,
        image_mean=HALF,
        image_std=HALF,
    )
    file = checkpoint.preprocessor
    pixels = resolve_pixels(default, file, kwargs, OF_FILES)
    options = LfmOptions(pixels=pixels)
    known = {name: file[name] for name in OF_FILES if file.get(name) is not None}
    options = _with(options, known, CheckpointError, "preprocessor_config.json")
    given = {name: kwargs[name] for name in OF_FILES if name in kwargs}
    return _with(options, given, ConfigError, "mm_processor_kwargs")


def with_tokens(
    options: LfmOptions, tokens: int, given: Collection[str], *, may_raise: bool
) -> LfmOptions:
    """Returns the options of images of at most so many tokens. given: names of the user's own
    options. See MediaProcessor.with_budget. Raises ConfigError for bounds that exclude each
    other."""
    small = min(options.max_image_tokens, tokens)
    if "min_image_tokens" in given and options.min_image_tokens > small:
        raise ConfigError(
            f"min_image_tokens = {options.min_image_tokens} asks for more than the {tokens} of "
            "image_tokens; remove one of them"
        )
    left = tokens - small * options.use_thumbnail
    most = min(left // options.tokens_of_tile, MAX_TILES)
    if not may_raise or "max_tiles" in given:
        most = min(most, options.max_tiles)
    least = options.min_tiles if "min_tiles" in given else min(options.min_tiles, max(most, 2))
    is_split = options.do_image_splitting and most >= max(2, least)
    if "do_image_splitting" in given and options.do_image_splitting and not is_split:
        why = "the tokens of the fewest tiles, since do_image_splitting is on"
        raise too_few(tokens, max(2, least) * options.tokens_of_tile + tokens - left, why)
    return replace(
        options,
        do_image_splitting=is_split,
        min_tiles=least,
        max_tiles=most if is_split else options.max_tiles,
        min_image_tokens=min(options.min_image_tokens, small),
        max_image_tokens=small,
        max_tokens=tokens,
    )


def item_options(options: LfmOptions, given: Mapping[str, Any]) -> LfmOptions:
    """Resolves the options of one image. Raises MediaError for wrong names and values, and for more
    tokens than the engine allows, since it has measured the memory for these."""
    unknown = [name for name in given if name not in OF_ITEMS]
    if unknown:
        raise MediaError(
            f"one prompt or image cannot set {unknown[0]!r}, only {', '.join(OF_ITEMS)}; give it "
            "for all images, in LLM(mm_processor_kwargs=...)"
        )
    found = _with(options, given, MediaError, "mm_processor_kwargs")
    if found.most_tokens > options.most_tokens:
        raise MediaError(
            f"{', '.join(given)} allow {found.most_tokens} tokens of an image, the engine allows "
            f"{options.most_tokens}; raise them in LLM(mm_processor_kwargs=...)"
        )
    return found


def _with(
    options: LfmOptions, values: Mapping[str, Any], error: type[Exception], where: str
) -> LfmOptions:
    """Returns the options with other values. Raises `error` for wrong ones."""
    for name, value in values.items():
        wanted = _wanted(name, value, options.pixels.factor)
        if wanted:
            raise error(f"{where}: {name} must be {wanted}, got {value!r:.80}")
    found = replace(options, **values)
    for kind in ("tiles", "image_tokens"):
        found = replace(found, **apart(found, f"min_{kind}", f"max_{kind}", values))
        low, high = (getattr(found, f"{bound}_{kind}") for bound in ("min", "max"))
        if low > high:
            raise error(
                f"{where}: min_{kind} = {low} is above max_{kind} = {high}; change one of them"
            )
    return found


def _wanted(name: str, value: Any, factor: int) -> str | None:
    """Returns what an option must be; None if it is."""
    is_flag = isinstance(value, bool)
    if name in FLAGS:
        return None if is_flag else "True or False"
    if name == "max_pixels_tolerance":
        is_number = isinstance(value, (int, float)) and not is_flag and 0 < value < 1e6
        return None if is_number else "a number above 0"
    is_count = isinstance(value, int) and not is_flag and value > 0
    if name == "tile_size":
        is_side = is_count and value <= 4096 and value % factor == 0
        return None if is_side else f"a multiple of {factor} up to 4096"
    most = MAX_COUNTS[name]
    return None if is_count and value <= most else f"a whole number from 1 to {most}"
