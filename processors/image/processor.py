"""The image processors of the ERNIE 4.5 VL, GLM-4V, PaddleOCR-VL and Qwen-VL families: they turn an
RGB image into patch rows and a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, ClassVar

import torch

from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor, PixelKernels

from .decode import DecodedImage, ImageDecoder, ImageHeader
from .draft import resize_draft
from .embedded import check_names, embedded_grid
from .largest import blank
from .options import ImageOptions, item_options, resolve_options
from .patches import (
    Patchifier,
    clamp_aspect,
    fit_frames,
    fit_size,
    grow_sides,
    resize,
    unresized,
)


class ImageProcessor(MediaProcessor):
    """The image processor of all families; a family sets the class attributes. Safe for use from
    several threads.

    checkpoint: provides preprocessor_config.json and the vision tower's patch sizes. options: the
    engine's mm_processor_kwargs; one image may set min_pixels and max_pixels. Raises ConfigError
    and CheckpointError for wrong options.
    """

    kind = "image"
    default: ClassVar[ImageOptions]
    reads_pixel_bounds: ClassVar[bool]  # whether to read the file's min_pixels and max_pixels

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self.options = resolve_options(
            self.default,
            checkpoint.preprocessor,
            options,
            getattr(checkpoint.config, "vision_config", None),
            reads_pixel_bounds=self.reads_pixel_bounds,
        )
        self._decoder = ImageDecoder()
        self._patches = Patchifier(self.options)

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
        """Decodes bytes, a PIL image, a numpy array or a torch tensor to an upright RGB image.

        With fast_decode, JPEG bytes are decoded at draft quality, no smaller than the target size.
        Raises as ImageDecoder.decode; with fast_decode also MediaError as `target_size`.
        """
        wanted = self.target_size if self.options.fast_decode else None
        return self._decoder.decode(source, limits, wanted)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size, which `count_tokens` needs, without decoding pixels."""
        return self._decoder.peek(source, limits)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] and the grid of patches (1, rows,
        columns). key: hash of the item's digest and all resolved options."""
        own = item_options(self.options, options)
        height, width = self._target(item, own)
        if item.draft_of is None:
            pixels = resize(item.image, height, width, self.options)
        else:
            pixels = resize_draft(item.image, height, width, self.options.resample)
        patches = torch.from_numpy(self._patches.rows(pixels))
        patch = self.options.patch_size
        return MediaInput(
            kind=self.kind,
            tensors={"pixels": patches},
            num_tokens=self._num_tokens(height, width),
            key=self._key(item.digest, own),
            grid_thw=(1, height // patch, width // patch),
        )

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        own = item_options(self.options, options)
        return self._num_tokens(*self._target(item, own))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. The grid is needed."""
        check_names(self.kind, options)
        return embedded_grid(self.kind, grid, self.options)

    def largest(self, max_tokens: int) -> MediaInput:
        """Builds a square of the largest area, reduced to max_tokens."""
        factor = self.options.factor
        side = (math.isqrt(self.options.max_pixels) // factor + 1) * factor
        return blank(self.kind, *self.target_size(side, side), self.options, max_tokens)

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing. options: the item's; None: the engine's."""
        return fit_size(height, width, options or self.options)

    def _target(self, item: DecodedImage | ImageHeader, options: ImageOptions) -> tuple[int, int]:
        width, height = item.size
        return self.target_size(height, width, options)

    def _num_tokens(self, height: int, width: int) -> int:
        return (height // self.options.factor) * (width // self.options.factor)

    def _key(self, digest: str, options: ImageOptions) -> str:
        text = f"{type(self).__qualname__}\0{options!r}\0{digest}"
        return blake2b(text.encode(), digest_size=20).hexdigest()


class ErnieImageProcessor(ImageProcessor):
    """ERNIE 4.5 VL. The file's `size` bounds the area, by default 56 x 56 to 6177 x 28 x 28.

    Older preprocessor files also have min_pixels and max_pixels, which no implementation reads.
    """

    token = "<|IMAGE_PLACEHOLDER|>"
    markers = ("<|image@placeholder|>", "<|IMAGE_PLACEHOLDER|>")
    default = ImageOptions(min_pixels=56 * 56, max_pixels=6177 * 28 * 28)
    reads_pixel_bounds = False

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing; an aspect over 200 is reduced to 200."""
        if self.options.do_resize:
            height, width = clamp_aspect(height, width, self.options.factor)
        return super().target_size(height, width, options)


class QwenImageProcessor(ImageProcessor):
    """Qwen2-VL, Qwen2.5-VL: two frames per patch, 56 x 56 to 1280 x 28 x 28 pixels by default."""

    token = "<|image_pad|>"
    markers = ("<|image_pad|>",)
    default = replace(ErnieImageProcessor.default, max_pixels=1280 * 28 * 28, temporal_patch_size=2)
    reads_pixel_bounds = True


class Qwen3ImageProcessor(QwenImageProcessor):
    """Qwen3-VL: patches of 16 pixels, 256 x 256 to 4096 x 4096 pixels by default."""

    default = replace(
        QwenImageProcessor.default,
        min_pixels=256 * 256,
        max_pixels=4096 * 4096,
        patch_size=16,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )


class GlmImageProcessor(ImageProcessor):
    """GLM-4V and GLM-OCR: two frames per patch, whose area counts twice in min_pixels and
    max_pixels, as in transformers; by default 112 x 112 to 15,000 x 28 x 28."""

    token = "<|image|>"
    markers = ("<|image|>",)
    default = replace(QwenImageProcessor.default, min_pixels=112 * 112, max_pixels=15000 * 28 * 28)
    reads_pixel_bounds = False

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing; see fit_frames."""
        options = options or self.options
        if not options.do_resize:
            return unresized(height, width, options.factor)
        group = options.temporal_patch_size
        return fit_frames(height, width, group, options, group=group)


class PaddleOCRImageProcessor(ImageProcessor):
    """PaddleOCR-VL: 384 x 384 to 1536 x 1536 pixels by default. Patches that are merged are
    adjacent, where transformers orders patches row by row."""

    token = "<|IMAGE_PLACEHOLDER|>"
    markers = ("<|IMAGE_PLACEHOLDER|>",)
    default = replace(ErnieImageProcessor.default, min_pixels=384 * 384, max_pixels=1536 * 1536)
    reads_pixel_bounds = True

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing; sides below one factor are enlarged first."""
        if self.options.do_resize:
            height, width = grow_sides(height, width, self.options.factor)
        return super().target_size(height, width, options)
