"""Shows pictures of numbers as grays: 9 to 16 bits, 32 bits, with a sign, fractions.

Whole numbers without a sign are as bright as a share of their largest, and fractions of 0 to 1 as
they are. Of all others no format says which of them is white: the least becomes black, the greatest
white, and a note says so.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image

BITS, PHOTOMETRIC, SAMPLE_FORMAT, NO_DATA = 258, 262, 339, 42113  # tags of TIFF
SIGNED = 2  # of SAMPLE_FORMAT
ROUNDING = 1e-3  # how far fractions may leave 0..1: resampled pictures overshoot a little


def are_numbers(image: Image.Image) -> bool:
    """Whether the pixels of a loaded image are other numbers than 0 (black) to 255."""
    if image.mode.startswith("I") or image.mode == "F":
        return True
    return image.mode == "L" and _first(image, SAMPLE_FORMAT, 1) == SIGNED


def to_gray(image: Image.Image, notes: list[str]) -> np.ndarray:
    """Returns uint8 [H, W] of an image of numbers. notes: gets a sentence where a guess was made.

    Zeros of a TIFF are white where its tag PhotometricInterpretation says so (TIFF 6.0, page 37).
    """
    values, turned = np.asarray(image), _first(image, PHOTOMETRIC, 1) == 0
    if image.mode == "L":
        gray = _from_least_to_greatest(values.view(np.int8), image, notes)
    elif image.mode == "F":
        gray = _from_fractions(values, image, notes)
    elif image.mode == "I":
        gray = _from_32_bits(values, image, notes)
    else:
        bits = min(max(_first(image, BITS, 16), 9), 16)
        values = values.astype(np.uint16)
        gray = scale_bits(values, bits)
        transparent = image.info.get("transparency")
        if isinstance(transparent, int):
            gray[values == transparent] = 0 if turned else 255
    shown: np.ndarray = 255 - gray if turned else gray
    return shown


def scale_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Scales 0 to 2 ** bits - 1 to 0 to 255, rounded; what is above is white."""
    most = 2**bits - 1
    if bits == 16:  # 257 of its steps are one of 8 bits
        return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
    shares = (np.minimum(values, most).astype(np.uint32) * 255 + most // 2) // most
    scaled: np.ndarray = shares.astype(np.uint8)
    return scaled


def _from_fractions(values: np.ndarray, image: Image.Image, notes: list[str]) -> np.ndarray:
    known = values[np.isfinite(values)]
    low, high = known.min(initial=0), known.max(initial=0)
    if len(known) < values.size or low < -ROUNDING or high > 1 + ROUNDING:
        return _from_least_to_greatest(values, image, notes)
    rounded: np.ndarray = np.rint(np.clip(values, 0, 1) * 255)
    return rounded.astype(np.uint8)


def _from_32_bits(values: np.ndarray, image: Image.Image, notes: list[str]) -> np.ndarray:
    """Reads numbers of a file by its tags. An image made in memory has none: its numbers are of 8
    or 16 bits where they lie in these."""
    if hasattr(image, "tag_v2"):
        if _first(image, SAMPLE_FORMAT, 1) != SIGNED:
            values = values.view(np.uint32)
        return _from_least_to_greatest(values, image, notes)
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    if low < 0 or high > 65535:
        return _from_least_to_greatest(values, image, notes)
    bits = 8 if high <= 255 else 16
    notes.append(f"an image of 32-bit numbers up to {high} was read as one of {bits} bits")
    return values.astype(np.uint8) if bits == 8 else scale_bits(values, bits)


def _from_least_to_greatest(values: np.ndarray, image: Image.Image, notes: list[str]) -> np.ndarray:
    exact = values.astype(np.float64)
    is_known = np.isfinite(exact) & (exact != _no_data(image))
    known = exact[is_known]
    low, high = known.min(initial=np.inf), known.max(initial=-np.inf)
    gray = np.zeros(values.shape, np.uint8)
    if high > low:
        gray[is_known] = np.rint((known - low) * (255 / (high - low)))
    if known.size:
        notes.append(
            f"the image's numbers from {low:g} to {high:g} were shown from black to white, as it "
            "names no white"
        )
    if unknown := values.size - known.size:
        notes.append(f"{unknown} pixels of the image have no number and were shown as black")
    return gray


def _no_data(image: Image.Image) -> float:
    """Returns the number that means "none", which programs for maps write as text; else NaN."""
    with suppress(ValueError):
        return float(str(getattr(image, "tag_v2", {}).get(NO_DATA, "nan")).strip("\0 "))
    return float("nan")


def _first(image: Image.Image, tag: int, default: int) -> int:
    found: Any = getattr(image, "tag_v2", {}).get(tag, default)
    if isinstance(found, tuple):
        found = found[0] if found else default
    return found if isinstance(found, int) else default
