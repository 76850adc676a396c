"""Names of files: images, videos, URLs, and their natural order."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mmdeploy_llm.messages import MediaRef

# What files are called whose formats are read, as docs/media.md lists them.
_IMAGES = "apng avif bmp dib gif heic heif hif jfif jpe jpeg jpg png tif tiff webp"
_VIDEOS = "3g2 3gp asf avi f4v flv m2ts m4v mkv mov mp4 mpe mpeg mpg mts ogv qt vob webm wmv"
IMAGE_SUFFIXES = frozenset(f".{name}" for name in _IMAGES.split())
VIDEO_SUFFIXES = frozenset(f".{name}" for name in _VIDEOS.split())


def is_url(name: str) -> bool:
    """Returns whether the name of a media item or a corpus is a URL rather than a path."""
    return bool(MediaRef(kind="", uri=name).scheme)


def is_media_name(name: str) -> bool:
    """Returns whether a folder or glob yields a file of this name."""
    return is_visible(name) and Path(name).suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES


def is_video_name(name: str) -> bool:
    """Returns whether a file of this name is treated as a video."""
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def is_visible(name: str) -> bool:
    """Returns whether a folder shows a file of this name."""
    return not os.path.basename(name).startswith(".")


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Returns a sort key: digits compare by value, letters ignore case, ties go by the name."""
    chunks = re.split(r"(\d+)", name.casefold())
    # Digits are at odd indices, so text is compared with text and numbers with numbers.
    return [int(chunk) if index % 2 else chunk for index, chunk in enumerate(chunks)], name
