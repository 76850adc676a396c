"""Finds out whether transformers' processor numbers the images of a prompt, as MiniCPM-V's does:
<image_id>0</image_id><image>...</image>."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmdeploy_llm.errors import UnsupportedMediaError

SIDE = 64  # pixels of an image to try a processor with


def place_of_number(processor: Any) -> int | None:
    """Returns where an image's number is in its text in a prompt, for processors that number
    images; None for others. The first image has the number 0."""
    if getattr(processor, "image_id_start_token", None) is None:
        return None
    images = [np.zeros((SIDE, SIDE, 3), dtype=np.uint8)] * 2
    made = processor(
        images=images,
        text=[processor.image_token * len(images)],
        return_tensors="pt",
        return_text_replacement_offsets=True,
        return_mm_token_type_ids=False,
    )
    first, second = (found["replacement"] for found in made["text_replacement_offsets"][0])
    if first == second:
        return None
    pairs = zip(first, second, strict=False)
    place = next(at for at, (own, other) in enumerate(pairs) if own != other)
    if f"{first[:place]}1{first[place + 1 :]}" != second or first[place] != "0":
        raise UnsupportedMediaError(
            f"transformers' {type(processor).__name__} writes the second image of a prompt as "
            f"{second[:80]!r} and the first as {first[:80]!r}, which is not known here; use a "
            "plugin made for this model"
        )
    return place
