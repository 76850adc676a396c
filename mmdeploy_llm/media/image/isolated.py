"""Decodes image files in a worker process: the worker's functions, and those that call it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.isolation import Workers

from .files import DecodedImage, ImageHeader, LeastSize, decode_file, file_digest, peek_file

# These run in the worker and yield (JSON, uint8 array or None).


def peek(blob: bytes, limits: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], None]]:
    """Yields the size, (width, height)."""
    yield {"size": peek_file(blob, MediaLimits(**limits)).size}, None


def decode(
    blob: bytes, limits: Mapping[str, Any], least: Sequence[int] | None
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yields the pixels [height, width, 3]. least: lower bound of (height, width) for a draft."""
    wanted = None if least is None else lambda height, width: (least[0], least[1])
    made = decode_file(blob, MediaLimits(**limits), wanted)
    yield {"draft_of": made.draft_of, "notes": made.notes}, np.asarray(made.image)


# These run in the intake's threads.


def peek_apart(blob: bytes, limits: MediaLimits, workers: Workers) -> ImageHeader:
    """Runs files.peek_file in a worker."""
    [(fields, _)] = workers.decode(f"{__name__}:peek", blob, limits)
    width, height = fields["size"]
    return ImageHeader(size=(width, height))


def decode_apart(
    blob: bytes, limits: MediaLimits, wanted: LeastSize | None, workers: Workers
) -> DecodedImage:
    """Runs files.decode_file in a worker."""
    least = None
    if wanted is not None:
        width, height = peek_apart(blob, limits, workers).size
        least = wanted(height, width)
    [(fields, pixels)] = workers.decode(f"{__name__}:decode", blob, limits, least=least)
    assert pixels is not None, "decode yields pixels"
    draft_of = fields["draft_of"]
    return DecodedImage(
        image=Image.fromarray(pixels),
        digest=file_digest(blob, limits),
        draft_of=None if draft_of is None else (draft_of[0], draft_of[1]),
        notes=tuple(fields["notes"]),
    )
