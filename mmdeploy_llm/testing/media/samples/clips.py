"""Generates videos: samples, twins, and headers that claim hours."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits

from .pictures import Pixels, Twins, pixels

HOURS = 100_000  # seconds, more than a day
# Of twins: a second or more where nothing says the rate, so that who uses two frames a second, the
# fewest that families use, sees one before the twelfth and one from there on.
TWIN_FRAMES, TWIN_CUT = 30, 12
TWIN_SIDE = 224  # pixels: half a frame is more than a digest of a part would read


def samples() -> dict[str, Any]:
    """Returns name -> source, all of different content."""
    return {
        "mp4": video_bytes(pixels(48, 80, seed=1), num_frames=6),
        "mkv": video_bytes(pixels(64, 64, seed=2), num_frames=9, container="matroska"),
        "frames": [Image.fromarray(pixels(48, 64, seed=seed)) for seed in (3, 4, 5)],
    }


def twins() -> Twins:
    """Returns name -> two sources that differ in the lower half of their last or first frames
    only."""
    size = TWIN_FRAMES, TWIN_SIDE, TWIN_SIDE, 3
    clip = np.random.default_rng(8).integers(0, 256, size, dtype=np.uint8)
    lower = TWIN_SIDE // 2
    found: Twins = {}
    for name, half in (("last", slice(TWIN_CUT, None)), ("first", slice(TWIN_CUT))):
        other = clip.copy()
        other[half, lower:] = 255 - other[half, lower:]
        found[f"arrays that differ in their {name} frames"] = clip, other
        if name == "last":
            found["files that differ in their last bytes"] = lossless(clip), lossless(other)
    return found


def too_large() -> dict[str, tuple[Any, MediaLimits]]:
    """Returns name -> (source, limits that it exceeds)."""
    blob = video_bytes(pixels(64, 64, seed=1), num_frames=8)
    return {
        "pixels of a frame": (blob, MediaLimits(max_pixels=64 * 64 - 1)),
        "duration": (blob, MediaLimits(max_duration=0.1)),
        "duration of a day": (far_apart(pixels(64, 64, seed=1)), MediaLimits()),
    }


def video_bytes(picture: Pixels, *, num_frames: int, container: str = "mp4") -> bytes:
    """Encodes an MPEG-4 video of the picture moving to the left, ten frames per second."""
    frames = [np.roll(picture, -4 * index, axis=1) for index in range(num_frames)]
    return _encoded(frames, "mpeg4", container)


def lossless(clip: Pixels) -> bytes:
    """Encodes frames [T, H, W, 3] so that each keeps its pixels and its place in the file."""
    return _encoded(list(clip), "rawvideo", "avi", "bgr24")


def far_apart(picture: Pixels) -> bytes:
    """Encodes a video of two frames, HOURS apart."""
    return _encoded([picture, picture], "ffv1", "matroska", "bgr0", times=(0, HOURS * 10))


def _encoded(
    frames: list[Pixels],
    codec: str,
    container: str,
    pix_fmt: str = "yuv420p",
    times: tuple[int, ...] | None = None,
) -> bytes:
    """Encodes the frames; times: of each, in tenths of a second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream(codec, rate=10)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = pix_fmt
        for index, pixels_of_one in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels_of_one), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[index], Fraction(1, 10)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()
