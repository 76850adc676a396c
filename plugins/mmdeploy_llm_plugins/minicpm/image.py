"""The image processor of MiniCPM-V 4.6: an image is resized to the area of a slice, and a large one
also cut into a grid of slices, which follow it.

+-------------+      +-----+-----+
|             |      |  1  |  2  |
|  the image  |  +   +-----+-----+   each with nearly the area of a square of scale_resolution
|             |      |  3  |  4  |
+-------------+      +-----+-----+
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from mmdeploy_llm_processors.image.budget import within
from mmdeploy_llm_processors.image.embedded import check_names, embedded_grid
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import resize
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.image.tiling.tile_processor import TileProcessor
from mmdeploy_llm_processors.image.tiling.tiles import resolve_pixels

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import ITEM_NUMBER, Checkpoint, MediaInput
from mmdeploy_llm.media import DecodedImage, ImageHeader

# The texts of tokens, under their names in tokenizer_config.json.
TOKENS = {
    "image_token": "<|image_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
HALF = (0.5, 0.5, 0.5)
MERGES = {"16x": 4, "4x": 2}  # downsample_mode -> patches along a side of a token
MAX_PATCH = 2**10  # pixels
MAX_COUNTS = {"max_slice_nums": 256, "scale_resolution": 2**14}
FLAGS = ("slice_mode", "use_image_id")
OF_ITEMS = ("max_slice_nums", "slice_mode", "use_image_id")  # what one prompt or image can set
MODE = "downsample_mode"
NAMES = (*MAX_COUNTS, *FLAGS, MODE)
Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOptions:
    """Resolved options, under transformers' names.

    pixels: of every slice; its merge_size is that of `downsample_mode`.
    scale_resolution: pixels along a side of the square whose area a slice has.
    use_image_id: whether the number of an image stands before it.
    """

    pixels: ImageOptions
    max_slice_nums: int = 9
    scale_resolution: int = 448
    slice_mode: bool = True
    use_image_id: bool = True
    downsample_mode: str = "16x"
    max_tokens: int | None = None  # of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan for an image: its own (height, width), and rows and columns of slices of one size;
    none of them: there are no slices."""

    whole: Size
    rows: int = 0
    columns: int = 0
    part: Size = (0, 0)

    @property
    def num_slices(self) -> int:
        """Number of slices, without the image itself."""
        return self.rows * self.columns


class MiniCPMImageProcessor(TileProcessor):
    """Processes an image into itself and its slices; safe for use from several threads.

    checkpoint: provides preprocessor_config.json, the markers in tokenizer_config.json, and the
    sizes of the vision tower. options: the engine's mm_processor_kwargs; one image may set those in
    OF_ITEMS. Raises ConfigError and CheckpointError for wrong options.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self.options = resolve(checkpoint, options)
        self._texts = special_texts(checkpoint, TOKENS)
        self.token = self._texts["image_token"]
        self.markers = (self.token,)
        self._given = frozenset(options)
        if "max_slice_nums" in self._given:
            self.auto_tokens = (1 + self.options.max_slice_nums) * longest_side(self.options) ** 2
        super().__init__(self.options.pixels)

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See MediaProcessor: an image has as many slices as have room, and is smaller than a slice
        where not even one has."""
        limited, own = copy.copy(self), self.options
        most = own.max_slice_nums
        if may_raise and "max_slice_nums" not in self._given:
            room = tokens // longest_side(own) ** 2
            most = min(max(most, room), MAX_COUNTS["max_slice_nums"])
        limited.options = replace(own, max_slice_nums=most, max_tokens=tokens)
        return limited

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] of the image and its slices, the grid
        of patches of the image, and in `tiles` [2, 3] the grids of image and slices if there are
        slices. key: hash of the item's digest and all resolved options."""
        own = self._own(options)
        layout = layout_of(item.size, own)
        parts = [resize(item.image, *layout.whole, own.pixels, self._patches.kernels)]
        if layout.num_slices:
            parts += slices_of(item, layout, own.pixels)
        rows = np.concatenate([self._patches.rows(part) for part in parts])
        return self._input(layout, own, torch.from_numpy(rows), self.key_of(item, own))

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        return num_tokens(layout_of(item.size, self._own(options)), self.options)

    def shown_size(
        self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Returns the (width, height) of the slices of an image of this size together, or of the
        image where it has none."""
        found = layout_of(item.size, self._own(options))
        rows, columns = (found.rows, found.columns) if found.num_slices else (1, 1)
        height, width = found.part if found.num_slices else found.whole
        return columns * width, rows * height

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns the text of an image of this size."""
        own = self._own(options)
        return self._text(layout_of(item.size, own), own)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. The embeddings are those of an image without slices; the grid is
        needed."""
        check_names(self.kind, options)
        made = embedded_grid(self.kind, grid, self.options.pixels)
        text = self._marked("image", made.num_tokens, self.options)
        return replace(made, prompt_text=text)

    def largest(self, max_tokens: int) -> MediaInput | None:
        """Builds an image and the most slices, all square, reduced to max_tokens; None if not even
        the image fits. Rounded sides make long slices larger than the square of their area."""
        own = self.options
        side = longest_side(own)
        max_tokens = min(max_tokens, own.max_tokens or max_tokens)
        num = min(1 + own.max_slice_nums * own.slice_mode, max_tokens // side**2)
        if not num:
            return None
        patches = side * own.pixels.merge_size
        pixels = torch.zeros(num * patches**2, 3 * own.pixels.patch_size**2)
        return MediaInput(
            kind=self.kind,
            tensors={"pixels": pixels},
            num_tokens=num * side**2,
            key="largest-image",
            grid_thw=(num, patches, patches),
        )

    def _own(self, given: Mapping[str, Any]) -> SliceOptions:
        """Resolves the options of one image. Raises MediaError for wrong names and values, and for
        more slices than the engine allows, since it has measured the memory for these."""
        unknown = [name for name in given if name not in OF_ITEMS]
        if unknown:
            raise MediaError(
                f"one prompt or image cannot set {unknown[0]!r}, only {', '.join(OF_ITEMS)}; give "
                "it for all images, in LLM(mm_processor_kwargs=...)"
            )
        found = with_values(self.options, given, MediaError, "mm_processor_kwargs")
        most, allowed = (one.max_slice_nums * one.slice_mode for one in (found, self.options))
        if most > max(1, allowed):
            raise MediaError(
                f"{', '.join(given)} allow {most} slices of an image, the engine allows "
                f"{allowed}; set them in LLM(mm_processor_kwargs=...)"
            )
        return found

    def _input(
        self, layout: Layout, own: SliceOptions, pixels: torch.Tensor, key: str
    ) -> MediaInput:
        patch, tensors = own.pixels.patch_size, {"pixels": pixels}
        sizes = layout.whole, layout.part
        whole, part = (tuple(side // patch for side in size) for size in sizes)
        if layout.num_slices:
            tensors["tiles"] = torch.tensor([(1, *whole), (layout.num_slices, *part)])
        return MediaInput(
            kind=self.kind,
            tensors=tensors,
            num_tokens=num_tokens(layout, own),
            key=key,
            grid_thw=(1, whole[0], whole[1]),
            prompt_text=self._text(layout, own),
        )

    def _text(self, layout: Layout, own: SliceOptions) -> str:
        text = self._marked("image", tokens_of(layout.whole, own), own)
        part = self._marked("slice", tokens_of(layout.part, own), own)
        return text + "\n".join([part * layout.columns] * layout.rows)

    def _marked(self, name: str, count: int, own: SliceOptions) -> str:
        """Returns the placeholders of an image, with its number, or of a slice."""
        texts = self._texts
        marked = f"{texts[f'{name}_start_token']}{self.token * count}{texts[f'{name}_end_token']}"
        if name == "slice" or not own.use_image_id:
            return marked
        start, end = texts["image_id_start_token"], texts["image_id_end_token"]
        return f"{start}{ITEM_NUMBER}{end}{marked}"


def slices_of(item: DecodedImage, layout: Layout, options: ImageOptions) -> Sequence[np.ndarray]:
    """Returns the slices, line by line."""
    height, width = layout.part
    whole = resize(item.image, height * layout.rows, width * layout.columns, options)
    return [
        np.ascontiguousarray(whole[top : top + height, left : left + width])
        for top in range(0, whole.shape[0], height)
        for left in range(0, whole.shape[1], width)
    ]


def layout_of(size: Size, options: SliceOptions) -> Layout:
    """Plans an image of (width, height): with a budget, of the most slices that have room. Raises
    as _layout."""
    most = options.max_tokens
    if most is None:
        return _layout(size, options)
    for count in range(options.max_slice_nums, 0, -1):
        found = _layout(size, replace(options, max_slice_nums=count))
        if num_tokens(found, options) <= most:
            return found
    whole = fit_area(size[1], size[0], options, may_grow=True)
    return Layout(whole=within(whole, options.pixels.factor, most))


def _layout(size: Size, options: SliceOptions) -> Layout:
    """Plans an image of (width, height). Raises MediaError for one so long that it has more tokens
    than the engine has measured the memory for."""
    width, height = size
    rows, columns = slice_grid(size, options)
    if rows:
        # An image that is smaller than its grid still has a pixel for each slice.
        parts = max(round(height / rows), 1), max(round(width / columns), 1)
        part = fit_area(*parts, options, may_grow=True)
        whole = fit_area(height, width, options)
        found = Layout(whole=whole, rows=rows, columns=columns, part=part)
    else:
        found = Layout(whole=fit_area(height, width, options, may_grow=True))
    num_parts, area = 1 + options.max_slice_nums * options.slice_mode, options.pixels.factor**2
    most = num_parts * longest_side(options) ** 2
    num_tokens = (math.prod(found.whole) + found.num_slices * math.prod(found.part)) // area
    if options.max_tokens is None and num_tokens > most:
        raise MediaError(
            f"an image of {width} x {height} pixels has {num_tokens} tokens, {most} are allowed, "
            "because it is so long; crop or pad it"
        )
    return found


def longest_side(options: SliceOptions) -> int:
    """Returns the tokens along a side of the largest square part."""
    return options.scale_resolution // options.pixels.factor + 1


def slice_grid(size: Size, options: SliceOptions) -> tuple[int, int]:
    """Returns the rows and columns of slices whose aspect is closest to that of an image of (width,
    height), their number nearly that of its area; of several with the same aspect, the one with the
    most rows. (0, 0): the image is not cut. Source: transformers' MiniCPMV4_6ImageProcessor."""
    width, height = size
    area = width * height / options.scale_resolution**2
    count = min(math.ceil(area), options.max_slice_nums)
    if not options.slice_mode or count <= 1:
        return 0, 0
    best, least = (1, 1), math.inf
    aspect = math.log(width / height)
    for num in range(count - 1, count + 2):
        if num == 1 or num > options.max_slice_nums:
            continue
        for rows in (rows for rows in range(1, num + 1) if num % rows == 0):
            error = abs(aspect - math.log(num // rows / rows))
            if error < least or (error == least and rows > best[0]):
                best, least = (rows, num // rows), error
    return best


def fit_area(
    height: float, width: float, options: SliceOptions, *, may_grow: bool = False
) -> tuple[int, int]:
    """Returns (height, width) after resizing to the area of a slice, in whole tokens; a smaller
    image keeps its size unless it may grow. Source: find_best_resize of transformers."""
    side, factor = options.scale_resolution, options.pixels.factor
    if height * width > side * side or may_grow:
        aspect = width / height
        height = int(side / math.sqrt(aspect))
        width = int(height * aspect)
    return max(round(height / factor), 1) * factor, max(round(width / factor), 1) * factor


def tokens_of(size: Size, options: SliceOptions) -> int:
    """Returns the tokens of an image or a slice of (height, width)."""
    factor = options.pixels.factor
    return (size[0] // factor) * (size[1] // factor)


def num_tokens(layout: Layout, options: SliceOptions) -> int:
    """Returns the tokens of an image with its slices."""
    parts = layout.num_slices * tokens_of(layout.part, options)
    return tokens_of(layout.whole, options) + parts


def resolve(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> SliceOptions:
    """Resolves the options: the checkpoint's files, overridden by the user's. Raises
    CheckpointError for a wrong value in a file, ConfigError for an unknown name or wrong value of
    the user's."""
    patch, file = checkpoint.config.vision_config.patch_size, checkpoint.preprocessor
    if type(patch) is not int or not 0 < patch <= MAX_PATCH:
        raise CheckpointError(
            f"config.json has patch_size = {patch!r:.40}; it must be a whole number from 1 to "
            f"{MAX_PATCH}"
        )
    named = {name: file[name] for name in NAMES if file.get(name) is not None}
    given = {name: kwargs[name] for name in NAMES if name in kwargs}
    default = ImageOptions(
        min_pixels=1,
        max_pixels=1,
        patch_size=patch,
        image_mean=HALF,
        image_std=HALF,
    )
    options = SliceOptions(pixels=resolve_pixels(default, file, kwargs, NAMES))
    options = with_values(options, named, CheckpointError, "preprocessor_config.json")
    options = with_values(options, given, ConfigError, "mm_processor_kwargs")
    pixels = replace(options.pixels, merge_size=MERGES[options.downsample_mode])
    return replace(options, pixels=pixels)


def with_values(
    options: SliceOptions, values: Mapping[str, Any], error: type[Exception], where: str
) -> SliceOptions:
    """Returns the options with other values of NAMES. Raises `error` for wrong ones."""
    for name, value in values.items():
        wanted = _wanted(name, value)
        if wanted:
            raise error(f"{where}: {name} must be {wanted}, got {value!r:.80}")
    return replace(options, **values)


def _wanted(name: str, value: Any) -> str | None:
    """Returns what an option must be; None if it is."""
    if name == MODE:
        return None if value in [*MERGES] else " or ".join(map(repr, MERGES))
    if name in FLAGS:
        return None if isinstance(value, bool) else "True or False"
    most = MAX_COUNTS[name]
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
    return None if is_count else f"a whole number from 1 to {most}"
