"""Options of dynamic tiling: an image is a grid of square tiles, followed by a thumbnail."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm import media
from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm_processors.image.options import ImageOptions, apart, resolve_options

MAX_TILES = 1024  # of an image; more would take minutes to choose from
TILING = ("min_patches", "max_patches", "crop_to_patches")  # transformers' names
_BOUNDS = {"min_patches": "min_tiles", "max_patches": "max_tiles"}
# What else the user can set; the other options of images describe families with grids.
PIXEL_OPTIONS = ("resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class TileOptions:
    """Resolved options.

    pixels: of each tile; its patch_size and merge_size are the vision tower's.
    side: pixels along a side of a tile, a multiple of `pixels.factor`.
    min_tiles, max_tiles: bounds of the tiles in a grid, without the thumbnail.
    is_tiled: False makes each image one tile.
    """

    pixels: ImageOptions
    side: int
    min_tiles: int = 1
    max_tiles: int = 12
    is_tiled: bool = True

    @property
    def most_tiles(self) -> int:
        """The largest number of tiles of an image, the thumbnail included."""
        is_one = not self.is_tiled or self.max_tiles == 1
        return 1 if is_one else self.max_tiles + 1


def resolve_tiles(
    pixels: ImageOptions, side: int, preprocessor: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> TileOptions:
    """Resolves the options: the checkpoint's file, overridden by the user's.

    pixels: defaults, with the tower's patches. side: of the tower's images. Raises CheckpointError
    for a wrong value in the file, ConfigError for an unknown name or wrong value of the user's.
    """
    check_size(preprocessor.get("size"), side)
    found = resolve_pixels(pixels, preprocessor, kwargs, TILING)
    # transformers' processor sets crop_to_patches itself and does not read the file's.
    tiling = {name: preprocessor[name] for name in TILING[:2] if preprocessor.get(name) is not None}
    options = TileOptions(pixels=found, side=side)
    options = _with(options, tiling, CheckpointError, "preprocessor_config.json")
    given = {name: kwargs[name] for name in TILING if name in kwargs}
    return _with(options, given, ConfigError, "mm_processor_kwargs")


def resolve_pixels(
    default: ImageOptions, file: Mapping[str, Any], kwargs: Mapping[str, Any], others: Sequence[str]
) -> ImageOptions:
    """Resolves the options of the pixels of a tile: `default`, overridden by the checkpoint's file,
    then by the user's.

    others: names of the family's options, which are not resolved here. Raises CheckpointError for a
    wrong value in the file, ConfigError for an unknown name or wrong value of the user's.
    """
    names = (*PIXEL_OPTIONS, "image_std")
    known = sorted({*names, "do_convert_rgb", *others})
    unknown = [name for name in kwargs if name not in known and not name.startswith("video_")]
    if unknown:
        raise ConfigError(
            f"mm_processor_kwargs has no image option {unknown[0]!r} for this model; known: "
            f"{', '.join(known)}"
        )
    own = {name: file.get(name) for name in names}
    given = {name: value for name, value in kwargs.items() if name not in others}
    return resolve_options(default, own, given, None, reads_pixel_bounds=False)


def item_tiles(options: TileOptions, given: Mapping[str, Any]) -> TileOptions:
    """Resolves the options of one image. Raises MediaError for wrong names and values, and for more
    tiles than the engine allows, since it has measured the memory for these."""
    unknown = [name for name in given if name not in TILING]
    if unknown:
        raise MediaError(
            f"one prompt or image cannot set {unknown[0]!r}, only {', '.join(TILING)}; give it for "
            "all images, in LLM(mm_processor_kwargs=...)"
        )
    found = _with(options, given, MediaError, "mm_processor_kwargs")
    if found.most_tiles > options.most_tiles:
        raise MediaError(
            f"max_patches = {found.max_tiles} allows more tiles than the engine's "
            f"{options.most_tiles}; raise it in LLM(mm_processor_kwargs=...)"
        )
    return found


def of_tiles(
    options: TileOptions, count: int, given: Collection[str], *, may_raise: bool
) -> TileOptions:
    """Returns the options of images of at most so many tiles, the thumbnail included.

    given: names of the user's own options. See MediaProcessor.with_budget. Raises ConfigError for
    bounds that exclude each other.
    """
    most = min(count - 1, MAX_TILES) if count > 2 else 1
    if "min_patches" in given and options.is_tiled and options.min_tiles > most:
        raise ConfigError(
            f"min_patches = {options.min_tiles} asks for more tiles than the {count} that "
            "image_tokens leaves; remove one of them"
        )
    is_free = may_raise and "max_patches" not in given
    most = most if is_free else min(most, options.max_tiles)
    return replace(options, min_tiles=min(options.min_tiles, most), max_tiles=most)


def num_tiles(size: tuple[int, int], options: TileOptions) -> int:
    """Returns the number of tiles of an image of (width, height), the thumbnail included."""
    columns, rows = tile_grid(size, options)
    return columns * rows + (columns * rows > 1)


def tile_grid(size: tuple[int, int], options: TileOptions) -> tuple[int, int]:
    """Returns the (columns, rows) of an image of (width, height), see media.tile_grid."""
    if not options.is_tiled or options.max_tiles == 1:
        return 1, 1
    return media.tile_grid(
        size, options.side, min_tiles=options.min_tiles, max_tiles=options.max_tiles
    )


def tiles(image: Image.Image, options: TileOptions) -> Iterator[np.ndarray]:
    """Yields the tiles of the RGB image, each uint8 [side, side, 3]: line by line, then the
    thumbnail."""
    grid = tile_grid(image.size, options)
    return media.tiles(image, grid, options.side, resample=options.pixels.resample)


def grid_tiles(
    image: Image.Image, columns: int, rows: int, side: int, options: ImageOptions
) -> Iterator[np.ndarray]:
    """Yields the tiles of the RGB image resized to a grid, each uint8 [side, side, 3]: line by
    line."""
    return media.tiles(image, (columns, rows), side, resample=options.resample, has_thumbnail=False)


def _with(
    options: TileOptions, values: Mapping[str, Any], error: type[Exception], where: str
) -> TileOptions:
    """Returns the options with other values of TILING. Raises `error` for wrong ones."""
    for name, value in values.items():
        is_flag = isinstance(value, bool)
        is_count = isinstance(value, int) and not is_flag and 1 <= value <= MAX_TILES
        if name == "crop_to_patches" and not is_flag:
            raise error(f"{where}: {name} must be True or False, got {value!r:.80}")
        if name != "crop_to_patches" and not is_count:
            raise error(
                f"{where}: {name} must be a whole number from 1 to {MAX_TILES}, got {value!r:.80}"
            )
    found = replace(
        options,
        min_tiles=values.get("min_patches", options.min_tiles),
        max_tiles=values.get("max_patches", options.max_tiles),
        is_tiled=values.get("crop_to_patches", options.is_tiled),
    )
    fixed = [own for name, own in _BOUNDS.items() if name in values]
    found = replace(found, **apart(found, "min_tiles", "max_tiles", fixed))
    if found.min_tiles > found.max_tiles:
        raise error(
            f"{where}: min_patches = {found.min_tiles} is above max_patches = {found.max_tiles}; "
            "change one of them"
        )
    return found


def check_size(size: Any, side: int) -> None:
    """Raises CheckpointError for tiles of another size than the tower's images."""
    if size is not None and dict(size if isinstance(size, Mapping) else {}) != {
        "height": side,
        "width": side,
    }:
        raise CheckpointError(
            f"preprocessor_config.json has size = {size!r:.80}, but image_size of the model's "
            f"vision tower is {side}; tiles of another size are not supported"
        )
