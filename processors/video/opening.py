"""From whatever a caller gives as a video to an OpenVideo."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm_processors.image.decode import sniff as sniff_image

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits

from . import animation, container
from .animation import Animation
from .container import ContainerVideo
from .frames import FrameList, as_frames
from .timeline import OpenVideo

HEAD = 192  # bytes that tell the format
ACCEPTED = "MP4, MOV, MKV, WebM, AVI, MPEG, FLV, WMV, OGG, GIF, animated WebP or PNG"


def open_video(source: Any, limits: MediaLimits) -> OpenVideo:
    """The video behind bytes, a list of frames or an array; no frame of a file is decoded yet.

    Raises MediaError for what cannot be read, MediaLimitError for what is over a limit,
    UnsupportedMediaError for another form or format.
    """
    if not isinstance(source, (bytes, bytearray, memoryview)):
        return FrameList(as_frames(source), limits)
    blob = bytes(source)
    if not blob:
        raise MediaError("the video is empty (0 bytes)")
    if len(blob) > limits.max_bytes:
        raise MediaLimitError(
            f"the video has {len(blob)} bytes, {limits.max_bytes} are allowed; shrink it or raise "
            "max_media_bytes"
        )
    head = blob[:HEAD]
    animated = animation.sniff(head)
    if animated is not None:
        return Animation(blob, animated, limits)
    image = sniff_image(head[:16])
    if image is not None and image != "AVIF":
        raise UnsupportedMediaError(
            f"a {image} image stands where a video is wanted; give it as an image"
        )
    name = container.sniff(head)
    if name is None:
        raise UnsupportedMediaError(
            f"the first bytes are of no video format that is read here; convert it to {ACCEPTED}"
        )
    return ContainerVideo(blob, name, limits)
