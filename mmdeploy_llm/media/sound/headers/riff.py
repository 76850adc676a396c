"""Corrects headers of WAV files that FFmpeg takes for something else, and reads the length that
they state, which FFmpeg holds against the size of the file."""

from __future__ import annotations

import struct

from .chunks import chunk, is_known

EXTENSIBLE = 0xFFFE
PCM = bytes.fromhex("0100000000001000800000aa00389b71")
BITS, VALID_BITS, SUB_FORMAT = 14, 18, 24  # where the fields of the chunk "fmt " lie
EXTENSIBLE_SIZE = 40
BYTES_PER_SECOND = slice(8, 12)


def corrected(blob: bytes) -> bytes:
    """Returns a WAV file as FFmpeg should read it.

    Whole numbers of 20 or 24 bits in containers of 32 fill the upper bits: they are numbers of 32.
    FFmpeg takes them for floats of a program of its own kind, which have the same sizes.
    """
    form = chunk(blob, b"fmt ")
    at, size = (form.place, form.size) if form else (len(blob), 0)
    if not EXTENSIBLE_SIZE <= size <= len(blob) - at or blob[at : at + 2] != struct.pack(
        "<H", EXTENSIBLE
    ):
        return blob
    bits, valid = (blob[at + field : at + field + 2] for field in (BITS, VALID_BITS))
    if bits == valid or blob[at + SUB_FORMAT : at + EXTENSIBLE_SIZE] != PCM:
        return blob
    return blob[: at + VALID_BITS] + bits + blob[at + VALID_BITS + 2 :]


def stated_seconds(blob: bytes) -> float | None:
    """Returns how long a WAV file says it is; None where it does not."""
    form, data = (chunk(blob, name) for name in (b"fmt ", b"data"))
    if form is None or data is None or not is_known(data.size) or not blob.startswith(b"RIFF"):
        return None
    fields = blob[form.place : form.place + EXTENSIBLE_SIZE]
    rate = int.from_bytes(fields[BYTES_PER_SECOND], "little")
    return data.size / rate if rate else None
