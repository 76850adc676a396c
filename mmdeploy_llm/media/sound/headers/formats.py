"""Recognises sound files by their first bytes."""

from __future__ import annotations

HEAD = 200  # bytes that identify the format
ACCEPTED = "WAV, FLAC, MP3, OGG (Vorbis, Opus), M4A, AAC, AIFF, or a video with a sound track"
# A picture in an ID3 tag can have megabytes.
ID3, ID3_HEADER, ID3_FOOTER = b"ID3", 10, 0x10  # bytes of the header, and of the footer of a flag


def sniff(head: bytes) -> str | None:
    """Returns FFmpeg's name of the format that the first bytes announce; None if unknown. Only
    formats that hold sound themselves: never playlists, which name other files or URLs."""
    signatures = {
        "wav": head[:4] in (b"RIFF", b"RIFX", b"RF64", b"BW64") and head[8:12] == b"WAVE",
        "w64": head.startswith(b"riff\x2e\x91\xcf\x11"),
        "aiff": head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"),
        "flac": head.startswith(b"fLaC"),
        "mp3": head.startswith(b"ID3") or _is_mpeg(head),
        "aac": _is_adts(head),
        "ogg": head.startswith(b"OggS"),
        "mp4": head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"),
        "matroska": head.startswith(b"\x1a\x45\xdf\xa3"),
        "caf": head.startswith(b"caff"),
        "au": head.startswith(b".snd"),
        "avi": head[:4] == b"RIFF" and head[8:12] == b"AVI ",
        "flv": head.startswith(b"FLV"),
        "asf": head.startswith(b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
        "mpeg": head.startswith(b"\x00\x00\x01\xba"),
        "mpegts": b"\x47" == head[:1] == head[188:189] or b"\x47" == head[4:5] == head[196:197],
        "amr": head.startswith(b"#!AMR"),
    }
    return next((name for name, fits in signatures.items() if fits), None)


def sniff_file(blob: bytes) -> str | None:
    """Returns the format of a whole file: ID3 tags may stand before others than MP3."""
    name = sniff(blob[:HEAD])
    if name != "mp3" or not blob.startswith(ID3):
        return name
    after = sniff(blob[after_tags(blob) :][:HEAD])
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


def _is_mpeg(head: bytes) -> bool:
    """Whether a frame of MPEG audio, layer 1 to 3, begins here."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    layer, version = head[1] >> 1 & 3, head[1] >> 3 & 3
    return layer != 0 and version != 1 and head[2] >> 4 != 15 and head[2] >> 2 & 3 != 3


def _is_adts(head: bytes) -> bool:
    return len(head) > 2 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 and head[2] >> 2 & 15 < 13
