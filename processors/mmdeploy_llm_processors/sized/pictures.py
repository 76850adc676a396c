"""PictureProcessor: the base of image processors that say how one RGB image is prepared.
BoundedPictures: images within a budget of tokens, whatever the family counts them by."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from mmdeploy_llm_processors.image.budget import AUTO_TOKENS, too_few
from mmdeploy_llm_processors.image.embedded import check_names

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


Size = tuple[int, int]  # (width, height)
SMALL = 32, 32  # pixels of an image that has as few tokens as any
STEP, MAX_STEPS = 0.9, 40  # of the search for a size
MAX_SIZES = 4096  # image sizes whose choice is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """How images of one size are processed: at which level, shrunk to which size."""

    level: int
    size: Size


class BoundedPictures(MediaProcessor):
    """Processes images at the first level at which they have at most `tokens` tokens, and shrinks
    those that no level makes so few of.

    levels: processors of the same model, those that make the most tokens first. Raises ConfigError
    when not even a small image has so few.
    """

    kind = "image"

    def __init__(self, levels: Sequence[PictureProcessor], tokens: int) -> None:
        self._first, self._levels, self._tokens = levels[0], levels, tokens
        self.auto_tokens = self._first.auto_tokens
        self.token, self.markers = self._first.token, self._first.markers
        self.written_token, self.joints = self._first.written_token, self._first.joints
        self._choices: dict[tuple[Size, str], _Choice] = {}
        least = min(level.count_tokens(ImageHeader(size=SMALL), {}) for level in levels)
        if least > tokens:
            raise too_few(tokens, least, "the tokens of a small image of this model")

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> MediaProcessor:
        """See MediaProcessor."""
        return self._first.with_budget(min(tokens, self._tokens))

    def use_kernels(self, kernels: PixelKernels) -> None:
        """See PictureProcessor."""
        for level in self._levels:
            level.use_kernels(kernels)

    def close(self) -> None:
        """Ends the decoder processes."""
        self._first.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._first.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """See PictureProcessor."""
        return self._first.decode(source, limits)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """See PictureProcessor."""
        return self._first.peek(source, limits)

    def process(self, item: DecodedImage, options: Mapping[str, Any]) -> MediaInput:
        """See PictureProcessor; the image is shrunk first where no level suffices."""
        settings = self._first.own_settings(options)
        key = item.size, repr(settings)
        if key not in self._choices:  # most images fit at the first level
            made = self._first.processed(item.image, item.digest, self._first.capped(settings))
            if made.num_tokens <= self._tokens:
                self._keep(key, _Choice(level=0, size=item.size))
                return made
        choice, image = self._choice(item.size, settings), item.image
        if choice.size != item.size:
            image = image.resize(choice.size, resample=Image.Resampling.LANCZOS)
        level = self._levels[choice.level]
        return level.processed(image, item.digest, level.capped(settings))

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        return self.prompt_text(item, options).count(self.token)

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Mapping[str, Any]) -> str:
        """Returns the text of an image of this size."""
        settings = self._first.own_settings(options)
        choice = self._choice(item.size, settings)
        level = self._levels[choice.level]
        return level.text(choice.size, level.capped(settings))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See PictureProcessor. The embeddings are as many as without a budget."""
        return self._first.embedded(num_tokens, grid, options)

    def _choice(self, size: Size, settings: Mapping[str, Any]) -> _Choice:
        key = size, repr(settings)
        found = self._choices.get(key)
        if found is None:
            found = self._chosen(size, settings)
            self._keep(key, found)
        return found

    def _keep(self, key: tuple[Size, str], choice: _Choice) -> None:
        if len(self._choices) < MAX_SIZES:
            self._choices[key] = choice

    def _chosen(self, size: Size, settings: Mapping[str, Any]) -> _Choice:
        """Finds the level of an image of this size, else the largest size that has few enough
        tokens at the first. Raises MediaError when there is none."""
        counts = []
        for number in range(len(self._levels)):
            counts.append(self._count(number, size, settings))
            if counts[-1] <= self._tokens:
                return _Choice(level=number, size=size)
        for number in {0, len(self._levels) - 1}:
            scale = min(STEP, 1.02 * math.sqrt(self._tokens / counts[number]))
            for _ in range(MAX_STEPS):
                smaller = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
                if self._count(number, smaller, settings) <= self._tokens:
                    return _Choice(level=number, size=smaller)
                scale *= STEP
        raise MediaError(
            f"an image of {size[0]} x {size[1]} pixels has {min(counts)} tokens in this model, and "
            f"not fewer if it is shrunk; image_tokens allows {self._tokens}: raise it, or crop or "
            "pad the image"
        )

    def _count(self, number: int, size: Size, settings: Mapping[str, Any]) -> int:
        """Returns the tokens; those of a size that transformers refuses are too many."""
        level = self._levels[number]
        try:
            return level.text(size, level.capped(settings)).count(self.token)
        except MediaError:
            raise
        except Exception:  # transformers raises whatever its classes raise
            return 2**31
