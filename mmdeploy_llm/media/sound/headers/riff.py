"""Corrects headers of WAV files that FFmpeg takes for something else, or that say less than there
is, and reads the length that they state, which FFmpeg holds against the size of the file."""

from __future__ import annotations

import struct

FORM = 12  # where the chunks begin: after RIFF, the size, WAVE
MAX_CHUNKS = 1000
EXTENSIBLE = 0xFFFE
PCM = bytes.fromhex("0100000000001000800000aa00389b71")
BITS, VALID_BITS, SUB_FORMAT = 14, 18, 24  # where the fields of the chunk "fmt " lie
EXTENSIBLE_SIZE = 40
BYTES_PER_SECOND = slice(8, 12)
# Sizes that programs write which do not know it, since they write to a pipe: nearly 2 or 4 GiB.
UNKNOWN = (range(2**31 - 2**16, 2**31 + 1), range(2**32 - 2**16, 2**32))
APPENDED = (b"TAG", b"ID3", b"id3 ", bytes(8))  # what else may come after the chunks of a file


def corrected(blob: bytes) -> bytes:
    """Returns a WAV file as FFmpeg should read it, with all the samples that are there.

    Whole numbers of 20 or 24 bits in containers of 32 fill the upper bits: they are numbers of 32.
    FFmpeg takes them for floats of a program of its own kind, which have the same sizes.
    """
    blob = _with_all_samples(blob)
    at, size = _chunk(blob, b"fmt ")
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
    at, _ = _chunk(blob, b"fmt ")
    rate = int.from_bytes(blob[at : at + EXTENSIBLE_SIZE][BYTES_PER_SECOND], "little")
    _, size = _chunk(blob, b"data")
    is_known = rate and blob.startswith(b"RIFF") and _is_size(size)
    return size / rate if is_known else None


def _is_size(size: int) -> bool:
    return size > 0 and not any(size in sizes for sizes in UNKNOWN)


def _with_all_samples(blob: bytes) -> bytes:
    """Returns a file whose samples go on after the size that its header says with the size that
    they have: a recorder that lost power had no time to write it."""
    at, size = _chunk(blob, b"data")
    end = at + size + size % 2
    if not blob.startswith(b"RIFF") or not _is_size(size) or _are_chunks(blob, end):
        return blob
    return blob[: at - 4] + struct.pack("<I", min(len(blob) - at, 2**32 - 1)) + blob[at:]


def _are_chunks(blob: bytes, at: int) -> bool:
    """Returns whether chunks, or tags, or nothing, are from here on to the end."""
    while at + 8 <= len(blob):
        name, size = blob[at : at + 4], int.from_bytes(blob[at + 4 : at + 8], "little")
        if blob.startswith(APPENDED, at):
            return True
        if not all(32 <= byte < 127 for byte in name) or at + 8 + size > len(blob):
            return False
        at += 8 + size + size % 2
    return True


def _chunk(blob: bytes, wanted: bytes) -> tuple[int, int]:
    """Returns where the content of a chunk begins, and the size that it states; the end of the file
    and 0 where there is none."""
    at = FORM
    for _ in range(MAX_CHUNKS):
        name, size = blob[at : at + 4], int.from_bytes(blob[at + 4 : at + 8], "little")
        if name == wanted:
            return at + 8, size
        at += 8 + size + size % 2
    return len(blob), 0
