"""BoundedPictures: images within a budget of tokens, whatever the family counts them by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor, PixelKernels
from mmdeploy_llm.media import DecodedImage, ImageHeader
from mmdeploy_llm_processors.image.budget import too_few

if TYPE_CHECKING:
    from .pictures import PictureProcessor

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
