"""PictureProcessor: the base of image processors that say how one RGB image is prepared."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaInput,
    MediaLimits,
    MediaProcessor,
    PixelKernels,
)
from mmdeploy_llm.media import (
    DecodedImage,
    ImageDecoder,
    ImageHeader,
    Patchifier,
    PatchOptions,
)
from mmdeploy_llm_processors.image.budget import AUTO_TOKENS
from mmdeploy_llm_processors.image.embedded import check_names

from .bounded import BoundedPictures
from .processor import SizedProcessor

MAX_SIDE = 2**16  # pixels of an image that is described by its size
RAISED = 8  # times: how far above its default a budget raises a bound


class PictureProcessor(SizedProcessor):
    """Decodes images safely and prepares each as `prepare(image, settings)` says, where `image` is
    an upright RGB image of Pillow and the size is its (width, height).

    A budget (`image_tokens`) lowers the options in `bounds`, then shrinks the image.
    """

    kind = "image"
    auto_tokens: int | None = AUTO_TOKENS

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        if set(self.bounds) & self.given:  # the user's bound is what "auto" stands for
            self.auto_tokens = None
        self._decoder = ImageDecoder()
        self._kernels: PixelKernels | None = None
        self._patchifiers: dict[PatchOptions, Patchifier] = {}

    def use_kernels(self, kernels: PixelKernels) -> None:
        """See MediaProcessor: `patchify` computes with them."""
        self._kernels, self._patchifiers = kernels, {}

    def patchify(self, pixels: np.ndarray, options: PatchOptions) -> np.ndarray:
        """Converts uint8 [H, W, 3] to patch rows as media.patchify does, with the kernels if there
        are some."""
        found = self._patchifiers.get(options)
        if found is None:
            found = Patchifier(options)
            if self._kernels is not None:
                found.use_kernels(self._kernels)
            self._patchifiers[options] = found
        return found.rows(pixels)

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """Decodes bytes, a PIL image, a numpy array or a torch tensor to an upright RGB image."""
        return self._decoder.decode(source, limits)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size of the image without decoding pixels."""
        return self._decoder.peek(source, limits)

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def close(self) -> None:
        """Ends the decoder processes."""
        self._decoder.close()

    def content_of(self, item: DecodedImage, settings: Mapping[str, Any]) -> Image.Image:
        """Returns the RGB image."""
        return item.image

    def size_of(self, content: Image.Image) -> tuple[int, int]:
        """Returns (width, height)."""
        return content.size

    def blank(self, size: tuple[int, int]) -> Image.Image:
        """Returns a black image."""
        return Image.new("RGB", size)

    def levels(self, tokens: int, *, may_raise: bool) -> Sequence[PictureProcessor]:
        """Returns processors like this one that make fewer and fewer tokens of a large image, those
        with the most first: with lower values of `bounds`. See with_budget."""
        found: list[PictureProcessor] = []
        for name in self.bounds:
            most = self.settings[name]
            if may_raise and name not in self.given:
                most = min(RAISED * most, max(most, tokens))
            found += [self.with_settings({name: value}) for value in falling(most)]
        return found or [self]

    def with_settings(self, others: Mapping[str, Any]) -> Self:
        """Returns a processor with other values of its options."""
        found = copy.copy(self)
        found.settings = {**self.settings, **others}
        return found

    def capped(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the settings of an item with bounds not above those of this processor."""
        lower = {name: min(settings[name], self.settings[name]) for name in self.bounds}
        return {**settings, **lower} if lower else settings

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> MediaProcessor:
        """See MediaProcessor and levels. Raises ConfigError where not even a small image has so
        few."""
        return BoundedPictures(self.levels(tokens, may_raise=may_raise), tokens)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor: the text is that of an image of the option `size`, (width, height) in
        pixels. Raises MediaError without it, and where such an image has another number of tokens
        or another grid."""
        check_names(self.kind, options, "size")
        size = image_size(options.get("size"))
        made = self.prepare(self.blank(size), self.settings)
        check_rows(made.text.count(self.token), num_tokens, size)
        if grid not in (None, made.grid):
            raise MediaError(
                f"the grid {grid} of image_embeds is not that of an image of {size[0]} x {size[1]} "
                f"pixels in this model, {made.grid}"
            )
        return MediaInput(
            kind=self.kind,
            tensors={},
            num_tokens=num_tokens,
            key="",
            grid_thw=made.grid,
            prompt_text=made.text,
        )

    def _size(self, item: DecodedImage | ImageHeader, settings: Mapping[str, Any]) -> Any:
        return item.size


def falling(most: int) -> list[int]:
    """Returns all counts up to 8, and some of more, falling."""
    counts = {round(most * 0.8**power) for power in range(20)} | set(range(1, min(most, 8) + 1))
    return sorted((count for count in counts if count > 0), reverse=True)


def image_size(given: Any) -> tuple[int, int]:
    """Returns (width, height). Raises MediaError for anything but two bounded whole numbers."""
    try:
        width, height = map(operator.index, given)
    except (TypeError, ValueError):
        width = height = 0
    if not 0 < min(width, height) <= max(width, height) <= MAX_SIDE:
        raise MediaError(
            f"'size' of image_embeds must be (width, height) in pixels, at most {MAX_SIDE}, got "
            f"{given!r:.80}"
        )
    return width, height


def check_rows(count: int, num_tokens: int, size: tuple[int, int]) -> None:
    """Raises MediaError for embeddings that are not those of an image of this size."""
    if count != num_tokens:
        raise MediaError(
            f"image_embeds has {num_tokens} rows, but an image of {size[0]} x {size[1]} pixels "
            f"has {count} tokens in this model; give the image's own 'size', (width, height)"
        )
