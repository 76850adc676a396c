"""Video files: their format by their first bytes, and what opens them. Imports no torch, so that
a worker process is small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from mmdeploy_llm_processors.image.files import check_bytes
from mmdeploy_llm_processors.image.files import sniff as sniff_image

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits

from . import animation, container
from .animation import Animation
from .container import ContainerVideo
from .timeline import OpenVideo

HEAD = 192  # bytes that tell the format
ACCEPTED = "MP4, MOV, MKV, WebM, AVI, MPEG, FLV, WMV, GIF, animated WebP or PNG"
STILL_IMAGES = ("JPEG", "BMP", "TIFF")


def open_file(blob: bytes, limits: MediaLimits) -> OpenVideo:
    """The video behind the bytes of a file; no frame is decoded yet.

    Raises MediaError for what cannot be read, MediaLimitError for what is over a limit,
    UnsupportedMediaError for another format.
    """
    check_bytes(blob, "video", limits)
    head = blob[:HEAD]
    image = sniff_image(head)
    if image in animation.FORMATS:
        return Animation(blob, image, limits)
    if image in STILL_IMAGES:
        raise UnsupportedMediaError(
            f"a {image} image stands where a video is wanted; give it as an image"
        )
    name = container.sniff(head)
    if name is None:
        raise UnsupportedMediaError(
            f"the first bytes are of no video format that is read here; convert it to {ACCEPTED}"
        )
    return ContainerVideo(blob, name, limits)


# What a worker process is asked to do. Answers are (JSON, uint8 array or None).


def survey(blob: bytes, limits: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], None]]:
    """The timeline."""
    yield open_file(blob, MediaLimits(**limits)).timeline.to_json(), None


def frames(
    blob: bytes, limits: Mapping[str, Any], indices: Sequence[int]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """The frames, [height, width, 3], one by one."""
    for frame in open_file(blob, MediaLimits(**limits)).read(indices):
        yield {}, np.asarray(frame)
