"""One budget for every family: what "auto" stands for, and sizes that keep to a number of tokens
whatever the shape of an image. docs/media.md has the table of the families."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from mmdeploy_llm.errors import ConfigError

from .options import ImageOptions

# Several families' authors bound the pixels of an image to 1280 tokens in their examples;
# docs/media.md says which. The others take it where it is below their own bound.
AUTO_TOKENS = 1280
OF_PIXELS = frozenset({"max_pixels", "image_max_pixels", "size"})  # names of a user's bound


def with_tokens(
    options: ImageOptions, tokens: int, area: int, given: Collection[str], *, may_raise: bool
) -> ImageOptions:
    """Returns the options of images of at most so many tokens.

    area: of a token, as the family counts pixels. given: names of the user's own options. See
    MediaProcessor.with_budget. Raises ConfigError for bounds that exclude each other.
    """
    pixels = tokens * area
    if not options.do_resize:
        raise ConfigError("image_tokens needs images to be resized, and do_resize is off")
    if options.min_pixels > pixels and {"min_pixels", "image_min_pixels", "size"} & set(given):
        raise ConfigError(
            f"min_pixels = {options.min_pixels} asks for more than the {tokens} tokens of "
            "image_tokens; remove one of them"
        )
    is_free = may_raise and not OF_PIXELS & set(given)
    most = pixels if is_free else min(options.max_pixels, pixels)
    return replace(
        options, min_pixels=min(options.min_pixels, most), max_pixels=most, max_tokens=tokens
    )


def within(size: tuple[int, int], factor: int, max_tokens: int | None) -> tuple[int, int]:
    """Returns (height, width) in multiples of `factor` with at most max_tokens tokens: the size
    itself, else one of nearly the same aspect, or a single line of tokens."""
    rows, columns = (side // factor for side in size)
    if max_tokens is None or rows * columns <= max_tokens:
        return size
    shrink = math.sqrt(rows * columns / max_tokens)
    rows, columns = (max(1, math.floor(count / shrink)) for count in (rows, columns))
    if rows * columns > max_tokens:  # one of them is 1
        rows, columns = min(rows, max_tokens), min(columns, max_tokens)
    return rows * factor, columns * factor


def too_few(tokens: int, least: int, why: str, kind: str = "image") -> ConfigError:
    """Returns the error for a budget below what a family can keep to."""
    return ConfigError(f"{kind}_tokens = {tokens} is below {least}: {why}")
