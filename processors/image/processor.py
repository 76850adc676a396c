"""The image processors of the ERNIE 4.5 VL, PaddleOCR-VL and Qwen-VL families: RGB image in, patch
rows and grid out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, ClassVar

import torch

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor, PixelKernels

from .decode import DecodedImage, ImageDecoder, ImageHeader
from .draft import resize_draft
from .largest import blank
from .options import ImageOptions, resolve_options
from .patches import Patchifier, clamp_aspect, fit_size, grow_sides, resize


class ImageProcessor(MediaProcessor):
    """What all families share; a family sets the class attributes. Safe for use from several
    threads.

    checkpoint: gives the image options of preprocessor_config.json and the vision tower's patch
    sizes.
    options: the engine's mm_processor_kwargs. Raises ConfigError and CheckpointError for wrong
    ones.
    """

    kind = "image"
    default: ClassVar[ImageOptions]
    reads_pixel_bounds: ClassVar[bool]  # whether the file's min_pixels and max_pixels count

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
        """Ends the processes that decode."""
        self._decoder.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """What one call may take before it counts as hanging."""
        return self._decoder.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """The upright RGB image behind bytes, a PIL image, a numpy array or a torch tensor.

        With fast_decode, the bytes of a JPEG are decoded at draft quality, no smaller than the
        target size. Raises as ImageDecoder.decode, and MediaError for too long an image then.
        """
        wanted = self.target_size if self.options.fast_decode else None
        return self._decoder.decode(source, limits, wanted)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """As much of `decode` as `count_tokens` needs: the size, without decoding pixels."""
        return self._decoder.peek(source, limits)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """`pixels` float32 [num_patches, patch_dim] and the grid (1, rows, columns) of patches.

        key: over the item's digest and all resolved options.
        """
        height, width = self._target(item, options)
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
            key=self._key(item.digest),
            grid_thw=(1, height // patch, width // patch),
        )

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Placeholder tokens of an image of this size."""
        return self._num_tokens(*self._target(item, options))

    def largest(self, max_tokens: int) -> MediaInput:
        """A square of the largest area, cut to max_tokens."""
        factor = self.options.factor
        side = (math.isqrt(self.options.max_pixels) // factor + 1) * factor
        return blank(self.kind, *self.target_size(side, side), self.options, max_tokens)

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing."""
        return fit_size(height, width, self.options)

    def _target(
        self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        if options:
            raise MediaError(
                f"an image takes no options of its own, found {', '.join(map(repr, options))}; "
                "give them for all images in mm_processor_kwargs"
            )
        width, height = item.size
        return self.target_size(height, width)

    def _num_tokens(self, height: int, width: int) -> int:
        return (height // self.options.factor) * (width // self.options.factor)

    def _key(self, digest: str) -> str:
        text = f"{type(self).__qualname__}\0{self.options!r}\0{digest}"
        return blake2b(text.encode(), digest_size=20).hexdigest()


class ErnieImageProcessor(ImageProcessor):
    """ERNIE 4.5 VL. The area bounds are those of its `size`, 56 x 56 to 6177 x 28 x 28 by default.

    Its older preprocessor files carry min_pixels and max_pixels, which no implementation heeds.
    """

    token = "<|IMAGE_PLACEHOLDER|>"
    markers = ("<|image@placeholder|>", "<|IMAGE_PLACEHOLDER|>")
    default = ImageOptions(min_pixels=56 * 56, max_pixels=6177 * 28 * 28)
    reads_pixel_bounds = False

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing; an aspect over 200 is reduced to 200."""
        if self.options.do_resize:
            height, width = clamp_aspect(height, width, self.options.factor)
        return fit_size(height, width, self.options)


class QwenImageProcessor(ImageProcessor):
    """Qwen2-VL and Qwen2.5-VL: two frames a patch, 56 x 56 to 1280 x 28 x 28 pixels by default."""

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


class PaddleOCRImageProcessor(ImageProcessor):
    """PaddleOCR-VL: 384 x 384 to 1536 x 1536 pixels by default. Its patches come in blocks of those
    that are merged, not row by row as in transformers."""

    token = "<|IMAGE_PLACEHOLDER|>"
    markers = ("<|IMAGE_PLACEHOLDER|>",)
    default = replace(ErnieImageProcessor.default, min_pixels=384 * 384, max_pixels=1536 * 1536)
    reads_pixel_bounds = True

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing; sides below one factor are first brought to it."""
        if self.options.do_resize:
            height, width = grow_sides(height, width, self.options.factor)
        return fit_size(height, width, self.options)
