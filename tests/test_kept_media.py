"""Outputs keep sizes and thumbnails of media that were given in memory, and no pixels."""

import base64
import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.kept import THUMBNAIL_SIZE, KeptImage, KeptMedia, kept


def picture(size=(400, 300)):
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


def encoded(image, name="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def sideways():
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(picture(), "JPEG", exif=exif.tobytes())


def of_image(value):
    found = kept({"prompt": "p", "multimodal_data": {"image": value}})
    assert found["prompt"] == "p"
    return found["multimodal_data"]["image"]


@pytest.mark.parametrize(
    "item",
    [
        "a text",
        "data:,short",
        list(range(10_000)),
        np.arange(10_000),
        {"prompt": "p", "multimodal_data": {"image": ["a.png"]}},
        [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
        ("a", 1),
        b"few bytes",
        object(),
        None,
    ],
    ids=["text", "url", "ids", "array of ids", "dict", "chat", "tuple", "bytes", "object", "none"],
)
def test_the_same_object_where_no_media_are_in_memory(item):
    assert kept(item) is item


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (picture(), (400, 300)),
        (picture().convert("CMYK"), (400, 300)),
        (picture().convert("L"), (400, 300)),
        (encoded(picture()), (400, 300)),
        (bytearray(encoded(picture())), (400, 300)),
        (sideways(), (300, 400)),
        (Image.open(io.BytesIO(sideways())), (300, 400)),
        (np.zeros((300, 400, 3), np.uint8), (400, 300)),
        (torch.zeros(3, 300, 400), (400, 300)),
    ],
    ids=["rgb", "cmyk", "gray", "png", "bytearray", "turned", "opened", "array", "tensor"],
)
def test_a_picture_keeps_its_upright_size(value, size):
    found = of_image([value])[0]
    assert isinstance(found, KeptImage)
    assert found.size == size
    assert f"{size[0]} x {size[1]}" in repr(found)
    assert len(pickle.dumps(found)) < 30_000


def test_a_decoded_picture_keeps_a_thumbnail():
    large = picture((1000, 500))
    found = of_image(large)
    with Image.open(io.BytesIO(found.thumbnail)) as small:
        assert small.size == (THUMBNAIL_SIZE, THUMBNAIL_SIZE // 2)
        assert np.abs(np.asarray(small).astype(float).mean() - 127) < 20


def test_a_thumbnail_of_a_tiff_whose_zeros_are_white_is_no_negative():
    """Tag 262 of TIFF 6.0 says so; Pillow turns over values of 8 bits alone, and copies have no
    tags."""
    data = io.BytesIO()
    pixels = np.zeros((40, 5 * THUMBNAIL_SIZE), np.uint16)
    Image.fromarray(pixels).save(data, "TIFF", tiffinfo={262: 0})
    opened = Image.open(data)
    opened.load()
    assert opened.tag_v2[262] == 0
    with Image.open(io.BytesIO(of_image(opened).thumbnail)) as small:
        assert small.getpixel((1, 1)) == (255, 255, 255)


def test_a_file_that_nobody_decoded_is_not_decoded():
    opened = Image.open(io.BytesIO(encoded(picture())))
    assert of_image(opened).thumbnail is None
    assert opened.fp is not None


def test_few_thumbnails_of_many_frames():
    found = kept({"multimodal_data": {"video": [picture()] * 20}})["multimodal_data"]["video"]
    assert len(found) == 20
    assert 1 <= sum(own.thumbnail is not None for own in found) <= 4


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (b"\0" * 10_000, "10,000 bytes"),
        (encoded(picture())[:100] + bytes(8000), "bytes"),
        (np.zeros((16, 48, 64, 3), np.uint8), "ndarray of uint8 [16, 48, 64, 3]"),
        (torch.zeros(100, 64, dtype=torch.bfloat16), "Tensor of bfloat16 [100, 64]"),
        (io.BytesIO(b"x"), "file"),
        ("data:image/png;base64," + base64.b64encode(bytes(9000)).decode(), "data: URL"),
    ],
    ids=["bytes", "damaged", "video", "embeds", "file", "url"],
)
def test_other_media_say_what_they_were(value, form):
    found = of_image(value)
    assert isinstance(found, KeptMedia | KeptImage)
    assert form in repr(found)


def test_pixels_that_are_gone_are_an_error():
    found = of_image(picture())
    with pytest.raises(MediaError, match="its pixels are gone; give the picture itself"):
        found.draw((1, 1), MediaLimits())
    with pytest.raises(MediaError, match="gone"):
        found.digest  # noqa: B018


class Unreadable:
    """An object of a caller whose properties raise."""

    @property
    def shape(self):
        raise RuntimeError("no shape")


def test_what_cannot_be_looked_at_is_no_error_of_the_item():
    loop = {"prompt": "a"}
    loop["multimodal_data"] = {"image": [loop]}
    for value in (loop, {"prompt": "a", "image": Unreadable()}):
        assert repr(kept(value)) == "<dict that cannot be read>"
