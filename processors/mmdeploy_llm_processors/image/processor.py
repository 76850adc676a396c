"""The base of image processors that turn an RGB image into patch rows and a grid."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, ClassVar, Self

import torch

from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor, PixelKernels
from mmdeploy_llm.media import DecodedImage, ImageDecoder, ImageHeader, Patchifier, resize_draft

from .budget import AUTO_TOKENS, OF_PIXELS, with_tokens, within
from .embedded import check_names, embedded_grid
from .largest import blank
from .options import ImageOptions, item_options, resolve_options
from .patches import fit_size, resize


class ImageProcessor(MediaProcessor):
    """The image processor of families whose images are grids of patches; a family sets the class
    attributes, and `token` and `markers`. Safe for use from several threads.

    checkpoint: provides preprocessor_config.json and the vision tower's patch sizes. options: the
    engine's mm_processor_kwargs; one image may set min_pixels and max_pixels. Raises ConfigError
    and CheckpointError for wrong options.
    """

    kind = "image"
    auto_tokens = AUTO_TOKENS
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
        self._given = frozenset(options)
        if OF_PIXELS & self._given:  # the user's bound is what "auto" stands for
            self.auto_tokens = max(1, self.options.max_pixels // self.area)
        self._decoder = ImageDecoder()
        self._patches = Patchifier(self.options)

    @property
    def area(self) -> int:
        """Pixels of a token, as the family counts them in its bounds."""
        return self.options.factor**2

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See MediaProcessor: max_pixels becomes the area of so many tokens."""
        limited = copy.copy(self)
        limited.options = with_tokens(
            self.options, tokens, self.area, self._given, may_raise=may_raise
        )
        return limited

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
        Drawing is drawn at the target size.

        With fast_decode, JPEG bytes are decoded at draft quality, no smaller than the target size.
        Raises as ImageDecoder.decode; with fast_decode also MediaError as `target_size`.
        """
        wanted = self._fitted if self.options.fast_decode else None
        return self._decoder.decode(source, limits, wanted, self._fitted)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size, which `count_tokens` needs, without decoding pixels."""
        return self._decoder.peek(source, limits)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] and the grid of patches (1, rows,
        columns). key: hash of the item's digest and all resolved options."""
        own = item_options(self.options, options)
        height, width = self._target(item, own)
        if item.draft_of is None:
            kernels = self._patches.kernels
            pixels = resize(item.image, height, width, self.options, kernels)
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

    def shown_size(
        self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]
    ) -> tuple[int, int]:
        """Returns the (width, height) at which the model sees an image of this size."""
        height, width = self._target(item, item_options(self.options, options))
        return width, height

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
        return blank(self.kind, *self._fitted(side, side), self.options, max_tokens)

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing. options: the item's; None: the engine's."""
        return fit_size(height, width, options or self.options)

    def _target(self, item: DecodedImage | ImageHeader, options: ImageOptions) -> tuple[int, int]:
        width, height = item.size
        return self._fitted(height, width, options)

    def _fitted(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns `target_size` within the budget."""
        own = options or self.options
        return within(self.target_size(height, width, own), own.factor, own.max_tokens)

    def _num_tokens(self, height: int, width: int) -> int:
        return (height // self.options.factor) * (width // self.options.factor)

    def _key(self, digest: str, options: ImageOptions) -> str:
        text = f"{type(self).__qualname__}\0{options!r}\0{digest}"
        return blake2b(text.encode(), digest_size=20).hexdigest()
