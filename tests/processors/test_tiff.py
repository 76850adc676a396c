"""TIFF files of several pages: pages in order, previews and masks left out, damaged lists told."""

import io
import struct
from typing import ClassVar

import pytest
from mmdeploy_llm_processors.tiff import provide_media_processors
from mmdeploy_llm_processors.tiff.splitter import MAX_PAGES, TIFFSplitter
from PIL import Image

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import decode_image
from mmdeploy_llm.media.image.tiff import pages_of
from mmdeploy_llm.testing import SplitterConformance

LIMITS = MediaLimits()
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255))


def scan(count=3, **options):
    """Returns a file of a red, a green and a blue page, as Pillow writes it."""
    pages = [Image.new("RGB", (8 + index, 6), COLOURS[index]) for index in range(count)]
    buffer = io.BytesIO()
    pages[0].save(buffer, "TIFF", save_all=True, append_images=pages[1:], **options)
    return buffer.getvalue()


def written(*pages, order="<", is_big=False, last=0):
    """Returns a file by hand: of each page the value of its tags, besides those of one grey pixel.
    last: the place of the directory after the last one."""
    mark = {"<": b"II", ">": b"MM"}[order]
    head = struct.pack(f"{order}H", 43 if is_big else 42)
    head += struct.pack(f"{order}HHQ" if is_big else f"{order}I", *((8, 0, 16) if is_big else (8,)))
    body = bytearray(mark + head)
    for number, tags in enumerate(pages):
        own = {256: 1, 257: 1, 258: 8, 259: 1, 262: 1, 277: 1, 278: 1, 279: 1, **tags}
        form = ("Q", 20, "HHQQ") if is_big else ("H", 12, "HHII")
        size = struct.calcsize(order + form[0]) + form[1] * (len(own) + 1)
        end = len(body) + size + (8 if is_big else 4)
        entries = sorted({**own, 273: end}.items())
        body += struct.pack(order + form[0], len(entries))
        for tag, value in entries:
            body += struct.pack(order + form[2], tag, 16 if is_big else 4, 1, value)
        after = last if number == len(pages) - 1 else end + 1
        body += struct.pack(f"{order}{'Q' if is_big else 'I'}", after) + bytes([10 * (number + 1)])
    return bytes(body)


def split(blob, **options):
    return TIFFSplitter(None, {}).split(blob, options, LIMITS)


def greys(blob):
    return [decode_image(part.source).image.getpixel((0, 0))[0] for part in split(blob)]


class TestTIFF(SplitterConformance):
    """The contract of splitters."""

    spec = provide_media_processors()[0]
    samples: ClassVar = {
        "three": scan(),
        "one": scan(1),
        "packed": scan(compression="tiff_deflate"),
    }
    corrupt: ClassVar = {
        "nothing": b"",
        "a word": b"II*\0",
        "no TIFF": b"a text that is no picture",
    }
    item_options: ClassVar = ({"turn": 90}, {"turn": 180}, {"pages": "1"})


@pytest.mark.parametrize("options", [{}, {"compression": "tiff_lzw"}, {"big_tiff": True}])
def test_pages_are_in_order(options):
    parts = split(scan(**options))
    assert [part.label for part in parts] == ["page 1", "page 2", "page 3"]
    found = [decode_image(part.source).image for part in parts]
    assert [image.getpixel((1, 1)) for image in found] == list(COLOURS)
    assert [image.width for image in found] == [8, 9, 10]
    (second,) = split(scan(**options), pages="2")
    assert (second.label, decode_image(second.source).image.width) == ("page 2", 9)


@pytest.mark.parametrize(("order", "is_big"), [("<", False), (">", False), ("<", True)])
def test_previews_and_masks_are_no_pages(order, is_big):
    pages = ({254: 1}, {254: 2}, {254: 4}, {255: 2}, {255: 3}, {254: 5}, {254: 0})
    assert greys(written(*pages, order=order, is_big=is_big)) == [20, 50, 70]
    assert greys(written({254: 1}, {254: 4}, order=order, is_big=is_big)) == [10]


def test_a_bigtiff_of_big_endian_numbers_has_its_pages():
    """Which Pillow cannot read yet."""
    blob = written({}, {254: 1}, {}, order=">", is_big=True)
    assert len(split(blob)) == 2


@pytest.mark.parametrize("last", [8, 2**31, 10**6])
def test_what_a_damaged_list_has_lost_is_told(last):
    parts = split(written({}, {}, last=last))
    assert len(parts) == 3
    assert parts[1].label == "page 2"
    with pytest.raises(MediaError, match="page 3 and those after it cannot be found"):
        parts[2]


def test_a_list_without_an_end_is_refused():
    count = MAX_PAGES + 1
    chain = b"".join(struct.pack("<HI", 0, 8 + 6 * (at + 1)) for at in range(count))
    with pytest.raises(MediaLimitError, match="more than 100000 pages"):
        split(b"II*\0\x08\0\0\0" + chain)


def test_what_is_wrong_is_told():
    for options, message in (
        ({"dpi": 3}, "no option 'dpi'; known: pages"),
        ({"pages": "4"}, "the document has 3 pages"),
        ({"pages": 1.5}, "must be a text"),
    ):
        with pytest.raises(MediaError, match=message):
            split(scan(), **options)
    with pytest.raises(UnsupportedMediaError, match="got str"):
        split("a.tiff")
    with pytest.raises(MediaLimitError):
        TIFFSplitter(None, {}).split(scan(), {}, MediaLimits(max_bytes=10))
    with pytest.raises(EOFError):
        list(pages_of(lambda place, size: b""))
