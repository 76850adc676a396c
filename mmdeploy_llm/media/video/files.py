"""Opens video files by the format that their first bytes announce. Imports no torch, so that a
worker process is small."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.files import check_bytes
from mmdeploy_llm.media.image.files import sniff as sniff_image

from . import animation
from .animation import Animation
from .timeline import OpenVideo

ACCEPTED = "MP4, MOV, MKV, WebM, AVI, MPEG, FLV, WMV, GIF, animated WebP, PNG or AVIF"
STILL_IMAGES = ("JPEG", "BMP", "HEIF", "TIFF")


def open_file(blob: bytes, limits: MediaLimits) -> OpenVideo:
    """Opens the video in the bytes of a file; decodes no frame yet.

    Raises MediaError for a file that cannot be read, MediaLimitError for one over a limit,
    UnsupportedMediaError for another format.
    """
    check_bytes(blob, "video", limits)
    image = sniff_image(blob)
    if image in animation.FORMATS:
        return Animation(blob, image, limits)
    if image in STILL_IMAGES:
        raise UnsupportedMediaError(f"a {image} image was given as a video; give it as an image")
    container = _container()
    name = container.sniff(blob)
    if name is None:
        raise UnsupportedMediaError(
            f"the first bytes match no video format that is supported; convert it to {ACCEPTED}"
        )
    found: OpenVideo = container.ContainerVideo(blob, name, limits)
    return found


def _container() -> Any:
    """Returns the module that reads containers. Raises UnsupportedMediaError without PyAV."""
    try:
        return importlib.import_module(f"{__package__}.container")
    except ImportError as error:
        raise UnsupportedMediaError(
            f"videos are decoded by PyAV: pip install av ({error})"
        ) from error


# These run in a worker process and yield (JSON, uint8 array or None).


def survey(blob: bytes, limits: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], None]]:
    """Yields the timeline."""
    yield open_file(blob, MediaLimits(**limits)).timeline.to_json(), None


def frames(
    blob: bytes, limits: Mapping[str, Any], indices: Sequence[int]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yields the frames, [height, width, 3], one by one, with the notes on those so far."""
    opened = open_file(blob, MediaLimits(**limits))
    for frame in opened.read(indices):
        yield {"notes": list(opened.notes)}, np.asarray(frame)
