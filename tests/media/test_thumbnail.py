"""Previews are small, upright and on white; None for files that are not images."""

import io

import pytest
from PIL import Image

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.thumbnail import Thumbnails


def thumbnail(blob, size=320):
    maker = Thumbnails(size)
    try:
        (small,) = maker.previews(maker.decode(blob, MediaLimits()), {})
    except RequestError:
        return None
    return small


def encoded(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def opened(blob):
    image = Image.open(io.BytesIO(blob))
    assert image.format == "JPEG"
    return image


def test_large_pictures_shrink_and_keep_their_shape():
    small = opened(thumbnail(encoded(Image.new("RGB", (1000, 500))), 320))
    assert small.size == (320, 160)


def test_small_pictures_keep_their_size():
    assert opened(thumbnail(encoded(Image.new("RGB", (30, 40))))).size == (30, 40)


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    blob = encoded(Image.new("RGB", (40, 20)), "JPEG", exif=exif)
    assert opened(thumbnail(blob)).size == (20, 40)


@pytest.mark.parametrize("size", [0, 3, 20, -40])
def test_what_is_no_whole_picture_has_none(size):
    blob = encoded(Image.new("RGB", (50, 50), "red"))
    assert thumbnail(blob[:size]) is None
    assert thumbnail(b"%!PS-Adobe-3.0 EPSF-3.0") is None
