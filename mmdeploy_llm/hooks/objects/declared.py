"""Declares images, videos and sounds for the engine itself: names of their files, first bytes.

They are declared here once rather than by the spec of each family, and hold without any plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmdeploy_llm.values.first_bytes import FORMATS, FirstBytes

# What files are called whose formats are read, as docs/media.md lists them.
_IMAGES = "apng avif bmp dib gif heic heif hif jfif jpe jpeg jpg png tif tiff webp"
_VIDEOS = "3g2 3gp asf avi f4v flv m2t m2ts m4v mkv mov mp4 mpe mpeg mpg mts ogv qt vob webm wmv"
_SOUNDS = (
    "3ga aac ac3 aif aifc aiff amr au caf eac3 ec3 flac m4a m4b mka mp2 mp3 oga ogg opus rf64 snd "
    "spx w64 wav wave weba wma"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A kind whose files are known whatever is loaded; the fields are those of a spec."""

    kind: str
    suffixes: tuple[str, ...]
    columns: tuple[str, ...]
    first_bytes: tuple[FirstBytes, ...]
    part_types: tuple[str, ...] = ()
    yields: None = None
    priority: int = 0


def _suffixes(names: str) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names.split())


def _first_bytes(kind: str) -> tuple[FirstBytes, ...]:
    begins = (begin for own in FORMATS if own.kind == kind for begin in own.begins)
    return tuple(dict.fromkeys(begins))


BUILT_IN = (
    Declared(
        kind="image",
        suffixes=_suffixes(_IMAGES),
        columns=("image", "images"),
        first_bytes=_first_bytes("image"),
    ),
    Declared(
        kind="video",
        suffixes=_suffixes(_VIDEOS),
        columns=("video", "videos"),
        first_bytes=_first_bytes("video"),
    ),
    Declared(
        kind="audio",
        suffixes=_suffixes(_SOUNDS),
        columns=("audio", "audios"),
        first_bytes=_first_bytes("audio"),
        part_types=("input_audio",),
    ),
)
