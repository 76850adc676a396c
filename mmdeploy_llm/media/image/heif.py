"""Opens HEIF images (HEIC, HEIF) through pillow-heif, the extra `heif`; no other file imports it.
Its decoders are C++ and have crashed on broken files before, so they run in worker processes only.

The container may say how to rotate and mirror the picture, which the decoder does. Cameras repeat
that in EXIF, where it must not be done again; EXIF counts where the container says nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import struct
from collections.abc import Iterator
from typing import Any

from PIL import ImageFile

from mmdeploy_llm.errors import UnsupportedMediaError

OWN_ORIENTATION = "own_orientation"  # in an image's info: what is left to apply
MAX_BOXES = 10_000


def is_installed() -> bool:
    """Returns whether pillow-heif is there; imports nothing of it."""
    return importlib.util.find_spec("pillow_heif") is not None


def open_heif(file: io.BytesIO) -> ImageFile.ImageFile:
    """Opens the primary image of a file; decodes no pixels. Values of 10 and 12 bits are scaled to
    8. Raises UnsupportedMediaError without pillow-heif."""
    try:
        library: Any = importlib.import_module("pillow_heif")
    except ImportError as error:
        raise UnsupportedMediaError(
            f'a HEIF image is read by pillow-heif: pip install "mmdeploy-llm[heif]" ({error})'
        ) from None
    opened: ImageFile.ImageFile = library.HeifImageFile(file)
    # It has taken the orientation out of EXIF and XMP.
    stored = opened.info.get("original_orientation") or 1
    opened.info[OWN_ORIENTATION] = 1 if is_rotated_by_container(file.getvalue()) else stored
    return opened


def is_rotated_by_container(blob: bytes) -> bool:
    """Returns whether the properties of the images include a rotation or a mirroring."""
    for kind, begin, end in _boxes(blob, 0, len(blob)):
        if kind == b"meta":
            places = [(begin + 4, end)]  # after its version and flags
            for wanted in (b"iprp", b"ipco"):
                places = [
                    (first, last)
                    for place in places
                    for inner, first, last in _boxes(blob, *place)
                    if inner == wanted
                ]
            kinds = (inner for place in places for inner, _, _ in _boxes(blob, *place))
            return any(inner in (b"irot", b"imir") for inner in kinds)
    return False


def _boxes(blob: bytes, begin: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yields (type, begin, end) of the boxes in a range: size, type, perhaps a size of 64 bits,
    content. Size 0: to the end."""
    for _ in range(MAX_BOXES):
        if begin + 8 > end:
            return
        size, kind = struct.unpack_from(">I4s", blob, begin)
        head = 8
        if size == 1 and begin + 16 <= end:
            (size,), head = struct.unpack_from(">Q", blob, begin + 8), 16
        last = end if size == 0 else begin + size
        if (size and size < head) or last > end:
            return
        yield kind, begin + head, last
        begin = last
