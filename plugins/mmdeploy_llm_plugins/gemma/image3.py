"""The image processor of Gemma 3: an image is resized to one square. With pan and scan, crops of a
long image follow it.

+------------------+      +------+------+------+
|                  |      |      |      |      |
|    the image     |  +   |  1   |  2   |  3   |   each resized to the same square
|                  |      |      |      |      |
+------------------+      +------+------+------+
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from mmdeploy_llm_processors.image.budget import too_few
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import resize
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.image.tiling.tile_processor import SquareTileProcessor
from mmdeploy_llm_processors.image.tiling.tiles import check_size, resolve_pixels
from PIL import Image

from mmdeploy_llm.errors import CheckpointError, ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import DecodedImage, ImageHeader

# The texts of tokens, under their names in tokenizer_config.json.
TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
HALF = (0.5, 0.5, 0.5)
BILINEAR = 2
MAX_CROPS: Final = 64
MAX_SIDE = 2**16  # pixels
SIZE, COUNT = "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops"
FLAG, RATIO = "do_pan_and_scan", "pan_and_scan_min_ratio_to_activate"
NAMES = (FLAG, SIZE, COUNT, RATIO)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanOptions:
    """Resolved options, under transformers' names.

    pixels: of the image and of each crop; a block of patches becomes a token. side: pixels along a
        side of the square.
    pan_and_scan_min_crop_size: pixels along the shorter side of a crop.
    pan_and_scan_min_ratio_to_activate: of the longer to the shorter side of a cropped image.
    """

    pixels: ImageOptions
    side: int
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2

    @property
    def most_tiles(self) -> int:
        """The largest number of squares of an image, itself included."""
        return 1 + self.pan_and_scan_max_num_crops * self.do_pan_and_scan


class Gemma3ImageProcessor(SquareTileProcessor[PanOptions]):
    """Processes an image into one square, or several with pan and scan; safe for use from several
    threads.

    checkpoint: provides preprocessor_config.json, the markers in tokenizer_config.json, and the
    sizes of the vision tower. options: the engine's mm_processor_kwargs; one image may set those in
    NAMES. transformers' processor does not read these from the checkpoint's file either. Raises
    ConfigError and CheckpointError for wrong options.
    """

    bounds = frozenset({COUNT})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(resolve(checkpoint, options), options)
        self._texts = special_texts(checkpoint, TOKENS)
        self.token = self._texts["image_token"]
        self.markers = (self._texts["boi_token"],)

    def of_tiles(self, count: int, *, may_raise: bool) -> PanOptions:
        """See SquareTileProcessor. An image has one square unless do_pan_and_scan is on. Raises
        ConfigError where that is on and fewer than two crops have room."""
        own, crops = self.options, count - 1
        if not own.do_pan_and_scan:
            return own
        if crops < 2:
            raise too_few(
                count * self.tokens_of_tile,
                3 * self.tokens_of_tile,
                f"an image and two crops, since {FLAG} is on",
            )
        is_free = may_raise and COUNT not in self._given
        most = min(crops, MAX_CROPS if is_free else own.pan_and_scan_max_num_crops)
        return replace(own, pan_and_scan_max_num_crops=most)

    def own_options(self, given: Mapping[str, Any]) -> PanOptions:
        """Resolves the options of one image. Raises MediaError for wrong names and values, and for
        more crops than the engine allows, since it has measured the memory for these."""
        unknown = [name for name in given if name not in NAMES]
        if unknown:
            raise MediaError(
                f"one prompt or image cannot set {unknown[0]!r}, only {', '.join(NAMES)}; give it "
                "for all images, in LLM(mm_processor_kwargs=...)"
            )
        found = _with(self.options, given, MediaError)
        if found.most_tiles > self.options.most_tiles:
            raise MediaError(
                f"{', '.join(given)} allow {found.most_tiles - 1} crops of an image, the engine "
                f"allows {self.options.most_tiles - 1}; set them in LLM(mm_processor_kwargs=...)"
            )
        return found

    def num_tiles(self, size: tuple[int, int], options: PanOptions) -> int:
        """Returns 1 and the number of crops."""
        return 1 + len(crops(size, options))

    def shown_size(
        self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Returns (width, height) of the square that an image becomes, without its crops."""
        return self.options.side, self.options.side

    def tiles(self, image: Image.Image, options: PanOptions) -> Iterator[np.ndarray]:
        """Yields the image, then its crops, each resized."""
        side, kernels = options.side, self._patches.kernels
        yield resize(image, side, side, options.pixels, kernels)
        for box in crops(image.size, options):
            yield resize(image.crop(box), side, side, options.pixels, kernels)

    def text(self, num_tiles: int) -> str:
        """Returns what transformers' processor writes."""
        texts = self._texts
        tokens = texts["image_token"] * self.tokens_of_tile
        one = f"\n\n{texts['boi_token']}{tokens}{texts['eoi_token']}\n\n"
        if num_tiles == 1:
            return one
        rest = " ".join([one] * (num_tiles - 1))
        return (
            f"Here is the original image {one} and here are some crops to help you see better "
            f"{rest}"
        )


def crops(size: tuple[int, int], options: PanOptions) -> list[tuple[int, int, int, int]]:
    """Returns the (left, upper, right, lower) of the crops of an image of (width, height), along
    its longer side. Source: transformers' Gemma3ImageProcessor. Raises MediaError for an image of
    fewer pixels than crops."""
    longer, shorter, smallest = max(size), min(size), options.pan_and_scan_min_crop_size
    if not options.do_pan_and_scan or longer / shorter < options.pan_and_scan_min_ratio_to_activate:
        return []
    count = max(2, min(longer // smallest, math.floor(longer / shorter + 0.5)))
    count = min(options.pan_and_scan_max_num_crops, count)
    step = math.ceil(longer / count)
    if min(step, shorter) < smallest:
        return []
    starts = [step * number for number in range(count)]
    if starts[-1] >= longer:
        raise MediaError(
            f"an image of {size[0]} x {size[1]} pixels cannot be cut into {count} crops of {step} "
            f"pixels; raise {SIZE} or set {FLAG}=False"
        )
    spans = [(start, min(start + step, longer)) for start in starts]
    if size[0] >= size[1]:
        return [(start, 0, end, shorter) for start, end in spans]
    return [(0, start, shorter, end) for start, end in spans]


def resolve(checkpoint: Checkpoint, kwargs: Mapping[str, Any]) -> PanOptions:
    """Resolves the options: the checkpoint's file, overridden by the user's. Raises CheckpointError
    for a wrong value in the file or sizes that no tower has, ConfigError for an unknown name or
    wrong value of the user's."""
    config = checkpoint.config
    vision, num_tokens = config.vision_config, getattr(config, "mm_tokens_per_image", 256)
    image, patch = vision.image_size, vision.patch_size
    is_count = all(type(count) is int and 0 < count <= MAX_SIDE for count in (image, patch))
    tokens_side = math.isqrt(num_tokens) if type(num_tokens) is int and num_tokens > 0 else 0
    is_square = tokens_side and tokens_side**2 == num_tokens
    if not is_count or not is_square or image % (patch * tokens_side):
        raise CheckpointError(
            f"config.json has image_size = {image!r:.40}, patch_size = {patch!r:.40} and "
            f"mm_tokens_per_image = {num_tokens!r:.40}; the patches of a side must be a multiple "
            "of the tokens of a side"
        )
    check_size(checkpoint.preprocessor.get("size"), image)
    default = ImageOptions(
        min_pixels=1,
        max_pixels=1,
        patch_size=patch,
        merge_size=image // patch // tokens_side,
        resample=BILINEAR,
        image_mean=HALF,
        image_std=HALF,
    )
    pixels = resolve_pixels(default, checkpoint.preprocessor, kwargs, NAMES)
    given = {name: kwargs[name] for name in NAMES if name in kwargs}
    return _with(PanOptions(pixels=pixels, side=image), given, ConfigError)


def _with(options: PanOptions, values: Mapping[str, Any], error: type[Exception]) -> PanOptions:
    """Returns the options with other values of NAMES. Raises `error` for wrong ones."""
    for name, value in values.items():
        wanted = _wanted(name, value)
        if wanted:
            raise error(f"mm_processor_kwargs: {name} must be {wanted}, got {value!r:.80}")
    return replace(options, **values)


def _wanted(name: str, value: Any) -> str | None:
    """Returns what an option must be; None if it is."""
    is_flag = isinstance(value, bool)
    if name == FLAG:
        return None if is_flag else "True or False"
    if name == RATIO:
        is_ratio = isinstance(value, (int, float)) and not is_flag and 0 < value < math.inf
        return None if is_ratio else "a number above 0"
    most = MAX_CROPS if name == COUNT else MAX_SIDE
    is_count = isinstance(value, int) and not is_flag and 0 < value <= most
    return None if is_count else f"a whole number from 1 to {most}"
