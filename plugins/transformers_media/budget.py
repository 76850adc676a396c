"""Bounds the tokens of an image by the options of transformers' image processors, and where these
do not suffice by shrinking the image before it is processed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmdeploy_llm_processors.image.budget import too_few
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput, MediaLimits, MediaProcessor
from mmdeploy_llm.media import DecodedImage, ImageHeader

if TYPE_CHECKING:
    from .processor import AnyImageProcessor

Size = tuple[int, int]  # (width, height)
Fields = Mapping[str, Any]
SMALL = 32, 32  # pixels of an image that has as few tokens as any
SOFT_TOKENS = (1120, 560, 280, 140, 70)
BOUNDS = frozenset(
    {"size", "max_pixels", "max_patches", "max_slice_nums", "max_image_size", "max_soft_tokens"}
    | {"max_image_tokens", "image_grid_pinpoints"}
)
STEP, MAX_STEPS = 0.9, 40  # of the search for a size
MAX_SIZES = 4096  # image sizes whose choice is kept
# Switches that make several parts of an image.
SPLITS = ("do_image_splitting", "split_image", "do_pan_and_scan", "crop_to_patches", "slice_mode")


def levels_of(
    fields: Fields, tokens: int, given: Collection[str], *, may_raise: bool
) -> list[Fields]:
    """Returns options of an image processor that bound the tokens of an image, those with the most
    tokens first.

    fields: all of the processor. given: names of the user's own, which are not raised. Raises
    ConfigError for fewer tokens than the family knows.
    """
    found = [
        *_areas(fields, tokens, may_raise=may_raise and not {"size", "max_pixels"} & set(given))
    ]
    found += _counts(fields)
    if fields.get("max_soft_tokens"):
        most = tokens if may_raise and "max_soft_tokens" not in given else fields["max_soft_tokens"]
        known = [{"max_soft_tokens": n} for n in SOFT_TOKENS if n <= min(most, tokens)]
        if not known:
            raise too_few(tokens, SOFT_TOKENS[-1], "the smallest budget that this model knows")
        found += known
    if fields.get("max_image_tokens"):
        least = min(fields.get("min_image_tokens") or 1, tokens)
        most = min(fields["max_image_tokens"], tokens)
        found += [{"max_image_tokens": most, "min_image_tokens": least}]
    whole = {name: False for name in SPLITS if fields.get(name)}
    return [*(found or [{}]), *([whole] if whole else [])]


def _areas(fields: Fields, tokens: int, *, may_raise: bool) -> Iterator[Fields]:
    """Yields the bounds of processors whose `size` is an area."""
    size, patch, merge = fields.get("size"), fields.get("patch_size"), fields.get("merge_size")
    is_area = isinstance(size, Mapping) and {"shortest_edge", "longest_edge"} <= {
        name for name, value in size.items() if value
    }
    if not is_area or not isinstance(patch, int) or not isinstance(merge, int):
        return
    assert isinstance(size, Mapping)
    # Some count an image once for each frame of a patch; where one does not, the next level fits.
    for times in sorted({int(fields.get("temporal_patch_size") or 1), 1}, reverse=True):
        area = tokens * (patch * merge) ** 2 * times
        most = area if may_raise else min(area, int(size["longest_edge"]))
        least = min(int(size["shortest_edge"]), most)
        yield {"size": {"shortest_edge": least, "longest_edge": most}}
    if area <= int(size["shortest_edge"]):  # a small image, which is enlarged, may have too many
        yield {"size": {"shortest_edge": (patch * merge) ** 2, "longest_edge": most}}


def _counts(fields: Fields) -> Iterator[Fields]:
    """Yields the bounds of processors that cut an image into parts."""
    if "crop_to_patches" in fields and fields.get("max_patches"):  # on by default elsewhere too
        least = fields.get("min_patches") or 1
        for count in _falling(int(fields["max_patches"])):
            yield {"max_patches": count, "min_patches": min(least, count)}
    if fields.get("slice_mode") and fields.get("max_slice_nums"):
        yield from ({"max_slice_nums": count} for count in _falling(int(fields["max_slice_nums"])))
    if fields.get("do_image_splitting") and isinstance(fields.get("max_image_size"), Mapping):
        side = int(fields["max_image_size"]["longest_edge"])
        for count in range(-(-int(fields["size"]["longest_edge"]) // side), 0, -1):
            yield {"size": {"longest_edge": min(count * side, int(fields["size"]["longest_edge"]))}}
    pinpoints = fields.get("image_grid_pinpoints")
    if pinpoints:
        areas = sorted({height * width for height, width in pinpoints}, reverse=True)
        for area in areas:
            yield {"image_grid_pinpoints": [one for one in pinpoints if one[0] * one[1] <= area]}


def _falling(most: int) -> list[int]:
    """Returns all counts up to 8, and some of more, falling."""
    counts = {round(most * 0.8**power) for power in range(20)} | set(range(1, min(most, 8) + 1))
    return sorted((count for count in counts if count > 0), reverse=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """How images of one size are processed: at which level, shrunk to which size."""

    level: int
    size: Size


class BoundedImageProcessor(MediaProcessor):
    """Processes images at the first level at which they have at most `tokens` tokens.

    levels: processors of the same model, those that make the most tokens first. Raises ConfigError
    when not even a small image has so few.
    """

    kind = "image"

    def __init__(self, levels: list[AnyImageProcessor], tokens: int) -> None:
        first = levels[0]
        self.auto_tokens = first.auto_tokens
        self.token, self.markers = first.token, first.markers
        self._levels, self._tokens = levels, tokens
        self._choices: dict[Size, _Choice] = {}
        least = min(level.count_tokens(ImageHeader(size=SMALL), {}) for level in levels)
        if least > tokens:
            raise too_few(tokens, least, "the tokens of a small image of this model")

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> MediaProcessor:
        """See MediaProcessor."""
        return self._levels[0].with_budget(min(tokens, self._tokens))

    def close(self) -> None:
        """Ends the decoder processes."""
        self._levels[0].close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._levels[0].max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> DecodedImage:
        """See AnyImageProcessor."""
        return self._levels[0].decode(source, limits)

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """See AnyImageProcessor."""
        return self._levels[0].peek(source, limits)

    def process(self, item: DecodedImage, options: Fields) -> MediaInput:
        """See AnyImageProcessor; the image is shrunk first where no level suffices."""
        if item.size not in self._choices:  # most images fit at the first level
            made = self._levels[0].processed(item.image, item.digest, options)
            if made.num_tokens <= self._tokens:
                self._keep(item.size, _Choice(level=0, size=item.size))
                return made
        choice, image = self._choice(item.size), item.image
        if choice.size != item.size:
            image = image.resize(choice.size, resample=Image.Resampling.LANCZOS)
        return self._levels[choice.level].processed(image, item.digest, options)

    def count_tokens(self, item: DecodedImage | ImageHeader, options: Fields) -> int:
        """Returns the number of placeholder tokens of an image of this size."""
        choice = self._choice(item.size)
        return self._levels[choice.level].count_tokens(ImageHeader(size=choice.size), options)

    def prompt_text(self, item: DecodedImage | ImageHeader, options: Fields) -> str:
        """Returns the text of an image of this size."""
        choice = self._choice(item.size)
        return self._levels[choice.level].prompt_text(ImageHeader(size=choice.size), options)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Fields
    ) -> MediaInput:
        """See AnyImageProcessor. The embeddings are as many as without a budget."""
        return self._levels[0].embedded(num_tokens, grid, options)

    def _choice(self, size: Size) -> _Choice:
        found = self._choices.get(size)
        if found is None:
            found = self._chosen(size)
            self._keep(size, found)
        return found

    def _keep(self, size: Size, choice: _Choice) -> None:
        if len(self._choices) < MAX_SIZES:
            self._choices[size] = choice

    def _chosen(self, size: Size) -> _Choice:
        """Finds the level of an image of this size, else the largest size that has few enough
        tokens at the first. Raises MediaError when there is none."""
        counts = []
        for number in range(len(self._levels)):
            counts.append(self._count(number, size))
            if counts[-1] <= self._tokens:
                return _Choice(level=number, size=size)
        for number in {0, len(self._levels) - 1}:
            scale = min(STEP, 1.02 * math.sqrt(self._tokens / counts[number]))
            for _ in range(MAX_STEPS):
                smaller = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
                if self._count(number, smaller) <= self._tokens:
                    return _Choice(level=number, size=smaller)
                scale *= STEP
        raise MediaError(
            f"an image of {size[0]} x {size[1]} pixels has {min(counts)} tokens in this model, and "
            f"not fewer if it is shrunk; image_tokens allows {self._tokens}: raise it, or crop or "
            "pad the image"
        )

    def _count(self, level: int, size: Size) -> int:
        """Returns the tokens; those of a size that transformers refuses are too many."""
        try:
            return self._levels[level].count_tokens(ImageHeader(size=size), {})
        except MediaError:
            raise
        except Exception:  # transformers raises whatever its classes raise
            return 2**31
