"""HEIF images: read as other images are, in a worker process, upright exactly once."""

import contextlib
import io
import struct

import numpy as np
import pytest
from PIL import Image

from mmdeploy_llm.errors import MediaError, MediaLimitError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image import files
from mmdeploy_llm.media.image.decode import ImageDecoder
from mmdeploy_llm.media.image.heif import is_rotated_by_container

pillow_heif = pytest.importorskip("pillow_heif")
LIMITS = MediaLimits()


@pytest.fixture(scope="module")
def decoder():
    made = ImageDecoder()
    yield made
    made.close()


def corners(size=(64, 48)):
    """Returns an image with a colour of its own in each corner."""
    image = Image.new("RGB", size, "gray")
    half = size[0] // 2, size[1] // 2
    for place, colour in (((0, 0), "red"), ((half[0], 0), "lime"), ((0, half[1]), "blue")):
        image.paste(colour, (*place, place[0] + half[0], place[1] + half[1]))
    return image


def heif(image, **options):
    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, quality=-1, chroma=444, **options)
    return file.getvalue()


def exif(orientation):
    return b"Exif\0\0II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHHI", 0x112, 3, 1, orientation, 0, 0)


def is_close(one, other, tolerance=6):
    return np.abs(np.asarray(one, int) - np.asarray(other, int)).max() <= tolerance


def test_a_heic_file_is_decoded_in_a_process_of_its_own(decoder, monkeypatch):
    def refuse(*_):
        raise AssertionError("decoded in this process")

    image = corners()
    blob = heif(image)
    monkeypatch.setattr("mmdeploy_llm.media.image.decode.decode_file", refuse)
    monkeypatch.setattr("mmdeploy_llm.media.image.decode.peek_file", refuse)
    assert is_close(decoder.decode(blob, LIMITS).image, image)
    assert decoder.peek(blob, LIMITS).size == (64, 48)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("orientation", range(1, 9))
def test_it_is_upright_exactly_once(orientation):
    """The orientation stands in the container, in EXIF, or in both, as phones write it."""
    stored = corners()
    both = heif(stored, exif=exif(orientation))  # the encoder writes the container's too
    blobs = {
        "both": both,
        "container": with_exif(both, orientation, 1),
        "exif": with_exif(heif(stored, exif=exif(1)), 1, orientation),
    }
    for where, blob in blobs.items():
        is_rotated = where != "exif" and orientation != 1
        assert is_rotated_by_container(blob) == is_rotated, where
        found = files.decode_file(blob, LIMITS, None).image
        assert found.size == files.peek_file(blob, LIMITS).size
        assert is_close(found, files.upright(stored, orientation)), where


def with_exif(blob, old, new):
    """Changes the orientation in the EXIF data."""
    entry = struct.pack("<HHIH", 0x112, 3, 1, old)
    assert blob.count(entry) == 1
    return blob.replace(entry, struct.pack("<HHIH", 0x112, 3, 1, new))


def test_ten_bits_keep_their_brightness():
    values = np.linspace(0, 65535, 256).astype(np.uint16)
    pixels = np.repeat(np.tile(values, (16, 1))[..., None], 3, axis=2)
    made = pillow_heif.from_bytes("RGB;16", (256, 16), pixels.tobytes())
    file = io.BytesIO()
    made.save(file, quality=-1, chroma=444)
    blob = file.getvalue()
    assert pillow_heif.open_heif(blob, convert_hdr_to_8bit=False).info["bit_depth"] == 10
    found = files.decode_file(blob, LIMITS, None).image
    assert is_close(np.asarray(found)[0, :, 0], np.arange(256), 4)


def test_transparency_becomes_white():
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    found = files.decode_file(heif(image), LIMITS, None).image
    assert found.mode == "RGB"
    assert is_close(found, Image.new("RGB", (32, 32), "white"))


def test_limits_are_read_from_the_header(decoder):
    blob = heif(corners())
    with pytest.raises(MediaLimitError, match="64 x 48 = 3072 pixels, 100 are allowed"):
        decoder.decode(blob, MediaLimits(max_pixels=100))
    with pytest.raises(MediaLimitError, match="bytes"):
        decoder.peek(blob, MediaLimits(max_bytes=100))


def test_broken_files_are_that_items_error(decoder):
    blob = heif(corners())
    for broken in (blob[: len(blob) // 2], blob[:40], blob[:200] + bytes(len(blob) - 200)):
        with pytest.raises(MediaError):
            decoder.decode(broken, LIMITS)
    assert decoder.decode(blob, LIMITS).image.size == (64, 48)


@pytest.mark.full
def test_damaged_bytes_never_end_the_engine(decoder):
    blob = heif(corners())
    random = np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(blob)
        for place in random.integers(12, len(blob), 8):
            damaged[place] = random.integers(256)
        with contextlib.suppress(MediaError):
            decoder.decode(bytes(damaged), LIMITS)
    assert decoder.decode(blob, LIMITS).image.size == (64, 48)


def test_without_pillow_heif_it_says_what_reads_it(monkeypatch):
    monkeypatch.setattr(files, "OPENERS", {"PNG": files.OPENERS["PNG"]})
    with pytest.raises(UnsupportedMediaError, match=r'pip install "mmdeploy-llm\[heif\]"'):
        files.decode_file(heif(corners()), LIMITS, None)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\0\0\0\x08meta",
        struct.pack(">I4sI", 2**31, b"meta", 0),
        struct.pack(">I4sQ", 1, b"meta", 2**63),
        struct.pack(">I4sQ", 1, b"meta", 3),
        (b"\0\0\0\x08free" * 50),
        b"\0\0\0\x04free",
    ],
)
def test_boxes_without_sense(blob):
    assert not is_rotated_by_container(blob)
    assert files.sniff(blob) is None
