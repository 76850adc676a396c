"""Expands files, folders and globs into a list of image and video files in natural order."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator

from mmdeploy_llm.datasets.globs import expand_glob
from mmdeploy_llm.datasets.names import (
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    is_media_name,
    is_url,
    is_visible,
    natural_key,
)
from mmdeploy_llm.errors import ConfigError

REPORT_SCRIPT = "cards-001.js"  # beside the pictures of a large report


def find_media(paths: Iterable[str], *, is_recursive: bool = False) -> tuple[str, ...]:
    """Returns the image and video files that `paths` name, each once: in the order of `paths`,
    and in natural order within a folder or glob (2.png before 10.png).

    A file named directly is accepted whatever its suffix. A folder yields its visible files with
    a suffix of IMAGE_SUFFIXES or VIDEO_SUFFIXES, and with `is_recursive` those of its subfolders.
    Raises ConfigError when a path does not exist or when no file is found.
    """
    wanted = tuple(paths)
    found = {
        os.path.normpath(name): None for path in wanted for name in _expand(path, is_recursive)
    }
    if not found:
        hint = "" if is_recursive else "; --no-recursive left out subfolders"
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
    """Yields the media files that a glob matches; `**` matches across folders."""
    for name in sorted(expand_glob(pattern), key=natural_key):
        if os.path.isdir(name):
            yield from _folder(name, is_recursive)
        elif is_media_name(name):
            yield name


def _folder(folder: str, is_recursive: bool) -> Iterator[str]:
    """Yields the media files of a folder, then those of its subfolders, without following links
    to folders. The pictures of a report are left out."""
    for parent, folders, names in os.walk(folder):
        if REPORT_SCRIPT in names:
            folders.clear()
            continue
        yield from (
            os.path.join(parent, name)
            for name in sorted(names, key=natural_key)
            if is_media_name(name)
        )
        folders[:] = sorted(filter(is_visible, folders), key=natural_key) if is_recursive else []
