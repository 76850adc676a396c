"""Corrects headers of WAV files that FFmpeg takes for something else."""

from __future__ import annotations

import struct

FORM = 12  # where the chunks begin: after RIFF, the size, WAVE
MAX_CHUNKS = 1000
EXTENSIBLE = 0xFFFE
PCM = bytes.fromhex("0100000000001000800000aa00389b71")
BITS, VALID_BITS, SUB_FORMAT = 14, 18, 24  # where the fields of the chunk "fmt " lie
EXTENSIBLE_SIZE = 40


def corrected(blob: bytes) -> bytes:
    """Returns a WAV file as FFmpeg should read it.

    Whole numbers of 20 or 24 bits in containers of 32 fill the upper bits: they are numbers of 32.
    FFmpeg takes them for floats of a program of its own kind, which have the same sizes.
    """
    at = _format_chunk(blob)
    if at is None or blob[at : at + 2] != struct.pack("<H", EXTENSIBLE):
        return blob
    bits, valid = (blob[at + field : at + field + 2] for field in (BITS, VALID_BITS))
    if bits == valid or blob[at + SUB_FORMAT : at + EXTENSIBLE_SIZE] != PCM:
        return blob
    return blob[: at + VALID_BITS] + bits + blob[at + VALID_BITS + 2 :]


def _format_chunk(blob: bytes) -> int | None:
    """Returns where the content of the chunk "fmt " begins; None without a whole extensible one."""
    at = FORM
    for _ in range(MAX_CHUNKS):
        name, size = blob[at : at + 4], int.from_bytes(blob[at + 4 : at + 8], "little")
        if name == b"fmt ":
            is_whole = EXTENSIBLE_SIZE <= size <= len(blob) - at - 8
            return at + 8 if is_whole else None
        at += 8 + size + size % 2
    return None
