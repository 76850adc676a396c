"""Generates small images and videos in common formats, for processors without own samples."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import av
import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.messages import MEDIA_KINDS

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

CORRUPT: Mapping[str, bytes] = MappingProxyType(
    {
        "no bytes at all": b"",
        "zero bytes": bytes(512),
        "noise": random.Random(0).randbytes(512),
    }
)


def samples(kind: str) -> dict[str, Any]:
    """Returns name -> source of that kind, all of different content; {} for an unknown kind."""
    if kind not in MEDIA_KINDS:
        return {}
    if kind == "video":
        return {
            "mp4": video_bytes(pixels(48, 80, seed=1), num_frames=6),
            "mkv": video_bytes(pixels(64, 64, seed=2), num_frames=9, container="matroska"),
            "frames": [Image.fromarray(pixels(48, 64, seed=seed)) for seed in (3, 4, 5)],
        }
    return {
        "png": image_bytes(pixels(48, 80, seed=1), "PNG"),
        "jpeg": image_bytes(pixels(64, 64, seed=2), "JPEG"),
        "tall png": image_bytes(pixels(120, 40, seed=3), "PNG"),
        "pillow image": Image.fromarray(pixels(56, 56, seed=4)),
        "array": pixels(40, 72, seed=5),
    }


def too_large(kind: str) -> dict[str, tuple[Any, MediaLimits]]:
    """Returns name -> (source of that kind, limits that it exceeds); {} for an unknown kind."""
    if kind not in MEDIA_KINDS:
        return {}
    if kind == "video":
        blob = video_bytes(pixels(64, 64, seed=1), num_frames=8)
        return {
            "pixels of a frame": (blob, MediaLimits(max_pixels=64 * 64 - 1)),
            "duration": (blob, MediaLimits(max_duration=0.1)),
        }
    return {
        "pixels of a file truncated after its header": (png_header(30_000, 30_000), MediaLimits()),
        "pixels of an array": (pixels(64, 64, seed=1), MediaLimits(max_pixels=64 * 64 - 1)),
    }


def pixels(height: int, width: int, *, seed: int) -> Pixels:
    """Returns a smooth random RGB picture, uint8 [height, width, 3]."""
    corners = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(picture)


def image_bytes(picture: Pixels, form: str) -> bytes:
    """Encodes the picture in Pillow's format `form`."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, form)
    return buffer.getvalue()


def video_bytes(picture: Pixels, *, num_frames: int, container: str = "mp4") -> bytes:
    """Encodes an MPEG-4 video of the picture moving to the left, ten frames per second."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.height, stream.width, _ = picture.shape
        stream.pix_fmt = "yuv420p"
        for index in range(num_frames):
            frame = np.ascontiguousarray(np.roll(picture, -4 * index, axis=1))
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG file that declares this size and ends after its header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checksum = zlib.crc32(b"IHDR" + header)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(header)) + b"IHDR" + header
        + struct.pack(">I", checksum)
        + struct.pack(">I", 1 << 20) + b"IDAT"
    )  # fmt: skip
