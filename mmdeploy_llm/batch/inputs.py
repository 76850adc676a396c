"""Which image and video files a command means: files, folders and globs, in an order a person
expects."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmdeploy_llm.errors import ConfigError

from .items import is_url

IMAGE_SUFFIXES = frozenset(
    {".avif", ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
)
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})


def find_media(paths: Iterable[str], *, is_recursive: bool = False) -> tuple[str, ...]:
    """The image and video files meant by `paths`, each once: in the order of `paths`, sorted
    naturally within a folder or glob (2.png before 10.png).

    A file is taken whatever its suffix. A folder gives its files with a suffix of IMAGE_SUFFIXES
    or VIDEO_SUFFIXES, those of its subfolders too with `is_recursive`; hidden ones are left out.
    Raises ConfigError when a path does not exist and when nothing is found at all.
    """
    wanted = tuple(paths)
    found = {
        os.path.normpath(name): None for path in wanted for name in _expand(path, is_recursive)
    }
    if not found:
        hint = "" if is_recursive else "; --recursive looks into subfolders too"
        raise ConfigError(
            f"no images or videos in {', '.join(map(repr, wanted)) or 'an empty list of paths'}: "
            f"looked for files that end in {' '.join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))}"
            f"{hint}"
        )
    return tuple(found)


def _expand(path: str, is_recursive: bool) -> Iterator[str]:
    if os.path.isdir(path):
        return _folder(path, is_recursive)
    if os.path.exists(path):
        return iter((path,))
    if is_url(path):
        raise ConfigError(f"{path[:80]!r} is a URL; give files, folders or globs on this machine")
    if not glob.has_magic(path):
        raise ConfigError(f"{path!r} does not exist; give files, folders or globs of images")
    return _glob(path, is_recursive)


def _glob(pattern: str, is_recursive: bool) -> Iterator[str]:
    """The files and folders a glob matches; `**` crosses folders."""
    for name in sorted(glob.iglob(pattern, recursive=True), key=natural_key):
        if os.path.isdir(name):
            yield from _folder(name, is_recursive)
        elif is_media_name(name):
            yield name


def _folder(folder: str, is_recursive: bool) -> Iterator[str]:
    """The images and videos of a folder, then those of its subfolders. Links to folders are not
    followed."""
    for place, folders, names in os.walk(folder):
        yield from (
            os.path.join(place, name)
            for name in sorted(names, key=natural_key)
            if is_media_name(name)
        )
        folders[:] = sorted(filter(_is_visible, folders), key=natural_key) if is_recursive else []


def is_media_name(name: str) -> bool:
    """Whether a file of this name is taken from a folder or a glob."""
    return _is_visible(name) and Path(name).suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES


def is_video_name(name: str) -> bool:
    """Whether a file of this name is taken for a video."""
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def _is_visible(name: str) -> bool:
    return not os.path.basename(name).startswith(".")


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sorts runs of digits by their value, letters without case, and equal ones by the text."""
    parts = re.split(r"(\d+)", name.casefold())
    # Digits are at the odd places, so texts meet texts and numbers meet numbers.
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name
