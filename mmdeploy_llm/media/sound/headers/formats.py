"""Recognises sound files by their first bytes."""

from __future__ import annotations

from mmdeploy_llm.values.first_bytes import HEAD, format_of

ACCEPTED = "WAV, FLAC, MP3, OGG (Vorbis, Opus), M4A, AAC, AIFF, AC-3, or a video with a sound track"
# A picture in an ID3 tag can have megabytes.
ID3, ID3_HEADER, ID3_FOOTER = b"ID3", 10, 0x10  # bytes of the header, and of the footer of a flag


def sniff(head: bytes) -> str | None:
    """Returns FFmpeg's name of the format that the first bytes announce; None if unknown. Only
    formats that hold sound themselves: never playlists, which name other files or URLs."""
    found = format_of(head[:HEAD])
    return (found.container if found else "") or None


def sniff_file(blob: bytes) -> str | None:
    """Returns the format of a whole file: ID3 tags may stand before others than MP3."""
    name = sniff(blob)
    if name != "mp3" or not blob.startswith(ID3):
        return name
    after = sniff(blob[after_tags(blob) :])
    return after if after in ("flac", "aac") else name


def after_tags(blob: bytes) -> int:
    """Returns where the ID3 tags of a file end."""
    at = 0
    while blob[at : at + len(ID3)] == ID3 and at + ID3_HEADER <= len(blob):
        size = 0
        for byte in blob[at + 6 : at + ID3_HEADER]:
            size = size << 7 | byte & 0x7F
        has_footer = bool(blob[at + 5] & ID3_FOOTER)
        at += ID3_HEADER + size + ID3_HEADER * has_footer
    return at
