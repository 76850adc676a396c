"""Divides a file into what FFmpeg reads as a file each."""

from __future__ import annotations

from collections.abc import Iterable

from .ogg import Link, links
from .riff import corrected


def parts_of(blob: bytes, name: str) -> Iterable[Link]:
    """Returns the parts of a file, in order. name: FFmpeg's of its format."""
    if name == "ogg":
        return links(blob)
    return (Link(blob=corrected(blob) if name == "wav" else blob),)
