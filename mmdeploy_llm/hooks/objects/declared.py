"""Declares images, videos and sounds for the engine itself: names of their files, first bytes.

They are declared here once rather than by the spec of each family, and hold without any plugin.
"""

from __future__ import annotations

from dataclasses import dataclass

FirstBytes = bytes | tuple[int, bytes]  # at the beginning of a file, or at an offset
HEAD = 512  # bytes of a file that first bytes may look at

# What files are called whose formats are read, as docs/media.md lists them.
_IMAGES = "apng avif bmp dib gif heic heif hif jfif jpe jpeg jpg png tif tiff webp"
_VIDEOS = "3g2 3gp asf avi f4v flv m2ts m4v mkv mov mp4 mpe mpeg mpg mts ogv qt vob webm wmv"
_SOUNDS = "aac aif aifc aiff amr au caf flac m4a m4b mp3 oga ogg opus rf64 snd w64 wav wave"
# Second bytes, after 0xff, of a frame of MPEG audio, version 2.5, 2 and 1, layer 3 and 2, and ADTS.
_MPEG = b"\xe2\xe3\xe4\xe5\xf2\xf3\xf4\xf5\xfa\xfb\xfc\xfd\xf0\xf1\xf8\xf9"
_OGG = (b"OpusHead", b"\x01vorbis", b"\x7fFLAC", b"Speex")  # in the first page
_HEIF = "avif avis heic heix heim heis hevc hevx mif1 msf1 mif2"


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


BUILT_IN = (
    Declared(
        kind="image",
        suffixes=_suffixes(_IMAGES),
        columns=("image", "images"),
        first_bytes=(
            *(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", (8, b"WEBP")),
            *(b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # TIFF
            *((4, b"ftyp" + brand.encode()) for brand in _HEIF.split()),
        ),
    ),
    Declared(
        kind="video",
        suffixes=_suffixes(_VIDEOS),
        columns=("video", "videos"),
        first_bytes=(
            *(b"\x1a\x45\xdf\xa3", b"FLV\x01", b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
            *(b"\0\0\x01\xba", (8, b"AVI ")),
            *((4, box) for box in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
        ),
    ),
    Declared(
        kind="audio",
        suffixes=_suffixes(_SOUNDS),
        columns=("audio", "audios"),
        first_bytes=(
            *((8, b"WAVE"), b"fLaC", b"ID3", (8, b"AIFF"), (8, b"AIFC"), b"caff"),
            *(b".snd\0", b"#!AMR", b"riff\x2e\x91\xcf\x11"),
            *((4, b"ftypM4A "), (4, b"ftypM4B ")),
            *((28, begin) for begin in _OGG),
            *(bytes((0xFF, second)) for second in _MPEG),
        ),
        part_types=("input_audio",),
    ),
)
