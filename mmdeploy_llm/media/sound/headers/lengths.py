"""Tells how long a sound file says it is, apart from what FFmpeg guesses, and divides a file into
what FFmpeg reads as a file each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .appended import files_in
from .chunks import Link, whole
from .formats import after_tags
from .ogg import links
from .riff import corrected
from .riff import stated_seconds as stated_by_riff

# Formats whose headers state how long the sound is. Of others FFmpeg computes it from the bit rate
# of the first frames, or has no header.
WITH_LENGTH = frozenset(
    ("wav", "w64", "aiff", "flac", "ogg", "mp4", "matroska", "caf", "au", "avi", "flv", "asf")
)
# In the first frame of an MP3 file: names of what may state the number of frames; a flag says so.
MPEG_FRAME, XING, HAS_FRAMES, VBRI = 64, (b"Xing", b"Info"), 1, b"VBRI"


def stated_seconds(link: Link, name: str, track: float, all_of_it: float) -> float:
    """Returns the seconds that the header of a part of a file states, 0 where it does not.

    name: FFmpeg's of its format; track, all_of_it: the seconds of its sound track and of all, as
    FFmpeg has them.
    """
    if not _states_length(link.blob, name):
        return 0.0
    if name == "matroska":  # states those of the whole file; a track's are FFmpeg's guess
        return 0.0 if track else all_of_it
    if name == "asf":  # the same; FFmpeg gives a track those of the file
        return all_of_it
    return link.stated or track or all_of_it


def _states_length(blob: bytes, name: str) -> bool:
    if name != "mp3":
        return name in WITH_LENGTH
    frame = blob[after_tags(blob) :][:MPEG_FRAME]
    for mark in XING:
        _, found, flags = frame.partition(mark)
        if found:
            return bool(int.from_bytes(flags[:4], "big") & HAS_FRAMES)
    return VBRI in frame


def parts_of(blob: bytes, name: str) -> Iterator[Link]:
    """Yields the parts of a file, in order. name: FFmpeg's of its format."""
    if name == "ogg":
        yield from links(blob)
        return
    for own in files_in(blob, name):
        found = whole(own)
        if name == "wav":
            stated = stated_by_riff(found.blob)
            found = replace(found, blob=corrected(found.blob), stated=stated)
        yield found
