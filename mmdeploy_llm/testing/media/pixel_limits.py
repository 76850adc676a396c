"""Checks of a media processor: that it looks at `max_pixels`, whatever the format of its items."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image, ImageFile

from mmdeploy_llm.errors import MediaLimitError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, demand, since

from .keys import difference
from .limits import error_of
from .subject import ProcessorSubject
from .truth import FORMATS

OF_PICTURES = ("pixel", "image", "patch", "frame")  # in names of tensors
CALL = "raise MediaLimitError where the size in the header is over limits.max_pixels"

UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


@contextmanager
def decoding() -> Iterator[list[int]]:
    """Yields a list that gets the number of pixels of each file that Pillow decodes in this
    process."""
    sizes: list[int] = []
    load = ImageFile.ImageFile.load

    def recorded(self: Any) -> Any:
        if getattr(self, "tile", None):  # what is not decoded yet
            sizes.append(self.size[0] * self.size[1])
        return load(self)

    ImageFile.ImageFile.load = recorded  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        ImageFile.ImageFile.load = load  # type: ignore[method-assign]


@since(1, 2)
def pixels_are_limited(subject: ProcessorSubject) -> None:
    """An item of more than max_pixels is refused, of whatever format, and none of its pixels are
    decoded; one of exactly as many is processed."""
    names = [name for name in subject.sources() if _is_picture(subject, subject.made(name))]
    if not names:
        raise CheckSkipped("its items have no pixels: nothing to add")
    for name in names:
        source, what = subject.sources()[name], f"sample {name!r} with max_pixels=1"
        with decoding() as sizes:
            made = _made(subject, source, what)
        most = max(sizes, default=0)
        demand(most <= 1, f"{what}: {most} pixels were decoded; {CALL}, first")
        # One that is drawn for the limit has another result.
        is_ignored = made is not None and difference(made, subject.made(name)) is None
        number = num_pixels(source)
        demand(
            not is_ignored or number == 1,
            f"{what} is processed as without a limit; {CALL}",
        )
        if number is not None and subject.spec.kind == "image":
            _demand_exact(subject, name, number)


def _made(subject: ProcessorSubject, source: Any, what: str) -> MediaInput | None:
    """Returns what is made of a source with max_pixels=1, None where it is refused."""
    found: list[MediaInput] = []
    limits = replace(subject.limits, max_pixels=1)
    error_of(lambda: found.append(subject.within(source, limits)), what)
    return found[0] if found else None


def _demand_exact(subject: ProcessorSubject, name: str, number: int) -> None:
    processor, source = subject.processor, subject.sources()[name]
    for most in (number, number - 1):
        what = f"sample {name!r} of {number} pixels with max_pixels={most}"
        limits = replace(subject.limits, max_pixels=most)
        found = error_of(lambda at=limits: processor.decode(source, at), what)  # type: ignore[misc]
        is_right = found is None if most == number else isinstance(found, MediaLimitError)
        how = "is decoded" if found is None else f"raises {type(found).__name__} ({found})"
        demand(is_right, f"{what} {how}; a limit is the largest number that is allowed")


def _is_picture(subject: ProcessorSubject, made: MediaInput) -> bool:
    """Whether an item has pixels, by its kind or by what is made of it."""
    is_named = any(word in name for name in made.tensors for word in OF_PICTURES)
    return subject.spec.kind in ("image", "video") or made.grid_thw is not None or is_named


def num_pixels(source: Any) -> int | None:
    """Returns the number of pixels of one picture that Pillow or numpy knows; None for others."""
    if isinstance(source, bytes):
        with suppress(*UNREADABLE), Image.open(io.BytesIO(source), formats=FORMATS) as image:
            one = getattr(image, "n_frames", 1) == 1
            return image.size[0] * image.size[1] if one else None
        return None
    if isinstance(source, Image.Image):
        return source.size[0] * source.size[1]
    if isinstance(source, np.ndarray) and source.ndim == 3 and source.shape[-1] in (1, 3, 4):
        return int(source.shape[0] * source.shape[1])
    return None


CHECKS: tuple[Check, ...] = (pixels_are_limited,)
