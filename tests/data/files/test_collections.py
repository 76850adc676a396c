"""HEIF and AVIF files of several pictures are told: only the main one of them is read."""

import io
import struct

import pillow_heif
import pytest
from PIL import Image

from mmdeploy_llm.data.files.collections import has_several
from mmdeploy_llm.data.files.files import find_media


def box(kind, *content):
    data = b"".join(content)
    return struct.pack(">I4s", 8 + len(data), kind) + data


def item(number, kind=b"hvc1", flags=0, version=2):
    own = struct.pack(">H" if version == 2 else ">I", number)
    return box(b"infe", bytes([version, 0, 0, flags]), own, b"\0\0", kind, b"\0")


def reference(kind, first, *others):
    return box(kind, struct.pack(f">HH{len(others)}H", first, len(others), *others))


def heif(items, references=()):
    listed = box(b"iinf", bytes(4), struct.pack(">H", len(items)), *items)
    linked = box(b"iref", bytes(4), *references) if references else b""
    return box(b"ftyp", b"heic", bytes(4)) + box(b"meta", bytes(4), listed, linked)


def several(data):
    def read(place, size):
        if place + size > len(data):
            raise EOFError
        return data[place : place + size]

    return has_several(read, len(data))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (heif([item(1)]), False),
        (heif([item(1), item(2)]), True),
        (heif([item(1), item(70000, version=3)]), True),
        (heif([item(1), item(2, flags=1)]), False),  # hidden
        (heif([item(1), item(2, b"Exif"), item(3, b"mime")]), False),
        (heif([item(1), item(2)], [reference(b"thmb", 2, 1)]), False),
        (heif([item(1), item(2)], [reference(b"auxl", 2, 1)]), False),
        (heif([item(9, b"grid"), item(1), item(2)], [reference(b"dimg", 9, 1, 2)]), False),
        (heif([item(9, b"grid"), item(1), item(2)], [reference(b"dimg", 9, 1)]), True),
        (heif([item(1)]) + box(b"moov"), True),  # a sequence
        (heif([item(1)]) + b"\0\0\0\0mdat rest", False),  # to the end
        (b"\0\0\0\1ftyp" + struct.pack(">Q", 2**63), False),
        (heif([item(1), item(2)])[:-5], False),
        (box(b"meta", bytes(3)), False),
        (box(b"meta", bytes(4), box(b"iinf", bytes(6), box(b"infe"))), False),
        (b"", False),
    ],
)
def test_pictures_are_counted(data, expected):
    assert several(data) is expected


def test_a_file_of_two_pictures_is_told(tmp_path):
    pictures = [Image.new("RGB", (64, 64), color) for color in ("red", "blue")]
    for name, count in (("one", 1), ("two", 2)):
        held = pillow_heif.from_pillow(pictures[0])
        for other in pictures[1:count]:
            held.add_from_pillow(other)
        out = io.BytesIO()
        held.save(out, quality=50)
        (tmp_path / f"{name}.heic").write_bytes(out.getvalue())
    found = find_media([str(tmp_path)])
    assert len(found.files) == 2
    (note,) = found.skipped.notes
    assert note.startswith("1 HEIF or AVIF file has several pictures, of which the main one is")
