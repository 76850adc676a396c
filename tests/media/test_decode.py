"""Input forms, modes, orientation, transparency, limits and faults of images."""

import io
import struct
import threading
import warnings
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageChops
from PIL.PngImagePlugin import PngInfo

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import to_array
from mmdeploy_llm.media.image.decode import FORMATS, ImageDecoder

DECODER = ImageDecoder()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def decoded(source, limits=None):
    return DECODER.decode(source, limits or MediaLimits()).image


def pixel(source):
    return decoded(source).getpixel((0, 0))


def close(one, other, tolerance):
    return ImageChops.difference(one, other).getextrema() <= ((0, tolerance),) * 3


# Formats


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP", "AVIF", "GIF", "JPEG"])
def test_every_accepted_format_is_read(format, encode):
    if format not in FORMATS:
        pytest.skip("this Pillow was built without AVIF")
    image = Image.new("RGB", (40, 30), (200, 30, 60))
    options = {"lossless": True} if format == "WEBP" else {}
    found = decoded(encode(image, format, **options))
    assert found.mode == "RGB"
    assert found.size == (40, 30)
    assert close(found, image, 0 if format in ("PNG", "BMP", "TIFF", "WEBP", "GIF") else 6)


@pytest.mark.parametrize("format", ["EPS", "PDF", "PPM", "ICO", "TGA", "JPEG2000", "PCX", "SGI"])
def test_other_formats_are_unsupported(format, encode):
    with pytest.raises(UnsupportedMediaError, match="convert it to one of PNG, JPEG"):
        decoded(encode(Image.new("RGB", (40, 30)), format))


def test_cve_2026_115915_eps_never_reaches_an_interpreter():
    with pytest.raises(UnsupportedMediaError):
        decoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) system\n")


def test_cve_2026_12491_animation_gives_its_first_frame(encode):
    frames = [Image.new("RGB", (9, 9), colour) for colour in (RED, GREEN)]
    for format in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if format == "WEBP" else {}
        blob = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
        assert pixel(blob) == RED


# Modes


def test_every_pillow_mode_becomes_rgb():
    gray, alpha = Image.new("L", (4, 4), 100), Image.new("L", (4, 4), 0)
    palette = Image.new("RGB", (4, 4), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    images = {
        "1": (Image.new("1", (4, 4), 1), WHITE),
        "L": (gray, (100,) * 3),
        "P": (palette, (10, 200, 30)),
        "LA": (Image.merge("LA", (gray, alpha)), WHITE),
        "RGBA": (Image.new("RGBA", (4, 4), (255, 0, 0, 0)), WHITE),
        "RGBX": (Image.new("RGB", (4, 4), RED).convert("RGBX"), RED),
        "RGBa": (Image.new("RGBA", (4, 4), (*RED, 255)).convert("RGBa"), RED),
        "La": (Image.merge("LA", (gray, Image.new("L", (4, 4), 255))).convert("La"), (100,) * 3),
        "CMYK": (Image.new("CMYK", (4, 4), (0, 255, 255, 0)), RED),
        "YCbCr": (Image.new("RGB", (4, 4), (90, 90, 90)).convert("YCbCr"), (90,) * 3),
        "HSV": (Image.new("HSV", (4, 4), (0, 255, 255)), RED),
        "I;16": (Image.fromarray(np.full((4, 4), 100 * 257, np.uint16)), (100,) * 3),
        "I;16B": (Image.frombytes("I;16B", (4, 4), struct.pack(">H", 100 * 257) * 16), (100,) * 3),
        "I": (Image.fromarray(np.full((4, 4), 100 * 257, np.int32)), (100,) * 3),
        "F": (Image.fromarray(np.full((4, 4), 0.5, np.float32)), (128,) * 3),
    }
    for mode, (image, colour) in images.items():
        assert image.mode == mode
        assert pixel(image) == colour, mode


def tiff(byte_order, photometric, values):
    """Writes a TIFF of one strip, by the specification. values: a row; photometric: of tag 262."""
    row, bits = np.ascontiguousarray(values), values.dtype.itemsize * 8
    sample = 3 if values.dtype.kind == "f" else 1  # tag 339: floats, or integers without a sign
    entries = {256: len(row), 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 1}
    entries |= {279: row.nbytes, 339: sample}
    data = row.astype(row.dtype.newbyteorder(byte_order)).tobytes()
    data += bytes(len(data) % 2)
    order = {"<": b"II", ">": b"MM"}[byte_order]
    fields = b"".join(
        struct.pack(f"{byte_order}HHI", tag, 4, 1) + struct.pack(f"{byte_order}I", value)
        for tag, value in entries.items()
    )
    head = order + struct.pack(f"{byte_order}HI", 42, 8 + len(data))
    return head + data + struct.pack(f"{byte_order}H", len(entries)) + fields + bytes(4)


@pytest.mark.parametrize("byte_order", ["<", ">"])
@pytest.mark.parametrize(
    ("dtype", "most"), [(np.uint8, 255), (np.uint16, 65535), (np.float32, 1.0)], ids=str
)
def test_zeros_of_a_tiff_are_white_where_it_says_so(dtype, most, byte_order):
    """Pillow 12 and 13 turn over values of 8 bits, and leave those of 16 and 32 bits."""
    values = np.array([0, most], dtype)
    for photometric, left, right in ((0, WHITE, (0, 0, 0)), (1, (0, 0, 0), WHITE)):
        found = decoded(tiff(byte_order, photometric, values))
        assert (found.getpixel((0, 0)), found.getpixel((1, 0))) == (left, right), photometric


def test_lab_becomes_rgb():
    grey = decoded(Image.merge("LAB", [Image.new("L", (4, 4), v) for v in (128, 128, 128)]))
    red, green, blue = grey.getpixel((0, 0))
    assert max(red, green, blue) - min(red, green, blue) <= 3
    assert 100 < red < 140


def test_cve_2026_12491_palette_with_alpha_is_on_white(encode):
    image = Image.new("P", (4, 4), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((0, 0), 1)
    blob = encode(image, "PNG", transparency=0)
    found = decoded(blob)
    assert found.getpixel((1, 1)) == WHITE
    assert found.getpixel((0, 0)) == BLUE
    image.info["transparency"] = bytes([128, 255])
    assert decoded(image).getpixel((1, 1)) == (255, 127, 127)
    with_alpha = Image.new("RGBA", (4, 4), (0, 0, 255, 0)).convert("P").convert("PA")
    assert with_alpha.mode == "PA"
    assert decoded(with_alpha).mode == "RGB"


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_transparent_colour_of_a_png_is_white(mode, encode):
    image = Image.new(mode, (4, 4), 7 if mode == "L" else (7, 8, 9))
    blob = encode(image, transparency=7 if mode == "L" else (7, 8, 9))
    assert pixel(blob) == WHITE


@pytest.mark.parametrize("interlace", [0, 1])
@pytest.mark.parametrize(
    ("colour", "bits"), [(0, 1), (0, 2), (0, 4), (0, 8), (0, 16), (2, 8), (2, 16)]
)
def test_only_the_colour_that_a_png_names_is_transparent(colour, bits, interlace):
    """All bits of a sample count (PNG specification, 11.3.2.1): neighbours stay as they are."""
    named, largest = 2**bits // 3, 2**bits - 1
    samples = [(named,), (named ^ 1,)]
    if colour:
        samples = [(named,) * 3, (named, named, named ^ 1), (named ^ 1, named, named)]
    found = decoded(png_of(samples, colour, bits, samples[0], interlace))
    shown = [found.getpixel((x, 0)) for x in range(len(samples))]
    assert shown[0] == WHITE
    expected = [[value * 255 / largest for value in sample] for sample in samples[1:]]
    assert np.allclose(shown[1:], [np.broadcast_to(values, 3) for values in expected], atol=1)


def test_a_png_without_its_transparent_colour_stays_as_it_is():
    samples = [(1000, 2000, 3000), (40000, 50000, 60000)]
    found = decoded(png_of(samples, 2, 16, (1000, 2000, 3001)))
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [(3, 7, 11), (156, 195, 234)]


def png_of(samples, colour, bits, transparent, interlace=0):
    """Writes a PNG of one line. samples: a tuple of values for each pixel."""

    def chunk(kind, data):
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    def packed(pixels):
        values = "".join(f"{value:0{bits}b}" for pixel in pixels for value in pixel)
        size = (len(values) + 7) // 8
        return b"\0" + int(values.ljust(size * 8, "0"), 2).to_bytes(size, "big")

    # The passes of Adam7 that hold pixels of the first line: (first column, step).
    passes = [(0, 8), (4, 8), (2, 4), (1, 2)] if interlace else [(0, 1)]
    lines = [samples[start::step] for start, step in passes]
    header = struct.pack(">IIBBBBB", len(samples), 1, bits, colour, 0, 0, interlace)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))
        + chunk(b"IDAT", zlib.compress(b"".join(packed(line) for line in lines if line)))
        + chunk(b"IEND", b"")
    )


def test_transparency_equals_transformers():
    from transformers.image_transforms import convert_to_rgb

    values = np.random.default_rng(0).integers(0, 256, (30, 20, 4), dtype=np.uint8)
    for mode in ("RGBA", "LA"):
        image = Image.fromarray(values).convert(mode)
        assert np.array_equal(np.asarray(decoded(image)), convert_to_rgb(image, return_numpy=True))


def test_sixteen_bit_png_is_scaled_not_clipped(encode):
    values = np.array([[0, 127, 129, 32768, 65535]], np.uint16)
    found = np.asarray(decoded(encode(Image.fromarray(values))))
    assert found[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    transparent = encode(Image.fromarray(values), transparency=32768)
    assert np.asarray(decoded(transparent))[0, :, 0].tolist() == [0, 0, 1, 255, 255]


# Orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_cve_2026_12491_exif_orientation(orientation, format, encode):
    # Each stored picture shows, upright, red at the top left and green at the top right.
    upright = Image.new("RGB", (48, 32), BLUE)
    upright.paste(RED, (0, 0, 16, 16))
    upright.paste(GREEN, (32, 0, 48, 16))
    stored = {
        1: lambda image: image,
        2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
        4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
        7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    blob = encode(stored, format, exif=exif)
    found = decoded(blob)
    assert found.size == upright.size
    assert DECODER.peek(blob, MediaLimits()).size == upright.size
    for place, colour in {(4, 4): RED, (44, 4): GREEN, (4, 28): BLUE}.items():
        assert sum(abs(a - b) for a, b in zip(found.getpixel(place), colour, strict=True)) < 40
    opened = Image.open(io.BytesIO(blob))
    assert decoded(opened).size == upright.size


@pytest.mark.one_is_quick
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("early", [1, 3])
def test_exif_after_the_pixels_of_a_png_is_found_without_decoding(encode, early, isolation):
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.effect_noise((20, 10), 50)
    late = _png_chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    exif[0x0112] = early
    blob = encode(image, "PNG", exif=exif)
    end = blob.rindex(b"IEND") - 4
    blob = blob[:end] + late + blob[end:]
    limits = MediaLimits(isolation=isolation)
    assert DECODER.decode(blob, limits).size == (10, 20)
    assert DECODER.peek(blob, limits).size == (10, 20)
    assert DECODER.peek(blob, replace(limits, max_bytes=len(blob))).size == (10, 20)
    with pytest.raises(MediaLimitError):
        DECODER.peek(blob, replace(limits, max_bytes=len(blob) - 1))


def test_xmp_and_raw_profiles_after_the_pixels_of_a_png(encode):
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'<rdf:Description tiff:Orientation="6"/>'
    raw = ("\nexif\n      26\n" + exif.tobytes().hex()).encode()
    chunks = {
        "xmp": _png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        "raw": _png_chunk(b"tEXt", b"Raw profile type exif\0" + raw),
        "zipped": _png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw)),
        "none": _png_chunk(b"tEXt", b"Comment\0nothing") + b"\xff\xff\xff\xffeXIf",
    }
    blob = encode(Image.new("RGB", (20, 10), RED), "PNG")
    end = blob.rindex(b"IEND") - 4
    assert DECODER.peek(blob[:end], MediaLimits()).size == (20, 10)  # the file may be cut off
    for name, chunk in chunks.items():
        late = blob[:end] + chunk + blob[end:]
        wanted = (20, 10) if name == "none" else (10, 20)
        assert DECODER.peek(late, MediaLimits()).size == wanted, name
        if name != "none":
            assert decoded(late).size == wanted, name


def _png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_broken_exif_is_no_orientation(encode):
    image = Image.new("RGB", (20, 10), RED)
    for exif in (b"Exif\0\0garbage!", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0"):
        assert decoded(encode(image, "JPEG", exif=exif)).size == (20, 10)


# Arrays and tensors


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (257, 129), (1500, 1001)])
def test_an_image_as_an_array(size):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    values = to_array(Image.fromarray(pixels))
    assert values.dtype == np.uint8
    assert np.array_equal(values, pixels)
    values[:] = 0  # the caller's array is writable


def test_arrays_of_every_form_are_the_same_image():
    values = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    wanted = decoded(Image.fromarray(values))
    tensor = torch.from_numpy(values)
    forms = [
        values,
        values.transpose(2, 0, 1),
        values.astype(np.float32) / 255,
        values.astype(np.float64) / 255,
        values.astype(np.uint16) * 257,
        np.dstack([values, np.full((20, 30), 255, np.uint8)]),
        np.asfortranarray(values),
        tensor,
        tensor.permute(2, 0, 1),
        tensor.permute(2, 0, 1).float() / 255,
        tensor.permute(2, 0, 1).double().requires_grad_() / 255,
    ]
    for form in forms:
        assert decoded(form).tobytes() == wanted.tobytes()


def test_gray_bool_and_transparent_arrays():
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for form in (gray, gray[:, :, None], torch.from_numpy(gray)[None]):
        found = decoded(form)
        assert found.size == (4, 3)
        assert found.getpixel((3, 2)) == (11, 11, 11)
    assert pixel(np.ones((3, 4), dtype=bool)) == WHITE
    assert pixel(np.zeros((3, 4, 4), dtype=np.uint8)) == WHITE
    assert pixel(torch.ones(3, 5, 5, dtype=torch.bfloat16)) == WHITE


def test_a_tensor_is_channels_first_and_an_array_channels_last_in_doubt():
    values = np.zeros((3, 8, 3), np.uint8)
    assert decoded(values).size == (8, 3)
    assert decoded(torch.from_numpy(values)).size == (3, 8)


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (np.full((4, 4, 3), 200.0), MediaError, r"0\.\.1, found 200 to 200"),
        (np.full((4, 4, 3), np.nan), MediaError, r"0\.\.1"),
        (np.zeros((4, 4, 3), np.int64), UnsupportedMediaError, "int64"),
        (np.zeros((4, 4, 3), complex), UnsupportedMediaError, "complex"),
        (np.zeros((2, 4, 4, 3), np.uint8), UnsupportedMediaError, "one image per item"),
        (np.zeros((5, 5, 2), np.uint8), UnsupportedMediaError, r"shape \[5, 5, 2\]"),
        (np.zeros((0, 4, 3), np.uint8), MediaError, "no pixels"),
        (np.zeros(4, np.uint8), UnsupportedMediaError, "shape"),
        (torch.zeros(3, 4, 4, device="meta"), UnsupportedMediaError, "meta"),
        (torch.zeros(4, 4).to_sparse(), UnsupportedMediaError, "sparse"),
        (object(), UnsupportedMediaError, "type object"),
        (5, UnsupportedMediaError, "type int"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_wrong_arrays(source, kind, message):
    with pytest.raises(kind, match=message):
        decoded(source)


# The caller's image, threads


def test_the_callers_image_is_not_changed(encode):
    image = Image.open(io.BytesIO(encode(Image.new("RGBA", (20, 10), (1, 2, 3, 4)))))
    decoded(image)
    assert (image.mode, image.size, image.info) == ("RGBA", (20, 10), {})
    assert image.getpixel((0, 0)) == (1, 2, 3, 4)
    values = np.zeros((4, 4, 3), np.uint8)
    decoded(values)
    assert not values.any()


@pytest.mark.parametrize("is_loaded", [True, False])
def test_an_image_that_the_caller_closed_is_not_called_corrupt(is_loaded, encode, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encode(Image.new("RGB", (20, 10))))
    left, closed, of_file = Image.open(path), Image.open(path), Image.open(file := path.open("rb"))
    if is_loaded:
        closed.load()
    with left:
        pass
    closed.close()
    file.close()
    for image in (left, closed, of_file):
        with pytest.raises(MediaError, match="was closed before it was read"):
            decoded(image)


def test_one_lazily_opened_image_in_many_threads(encode, noise):
    original = noise(300, 300)
    image = Image.open(io.BytesIO(encode(original)))
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(decoded(image).tobytes())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [original.tobytes()] * 8


def test_several_images_in_the_place_of_one_are_told_to_be_one_per_item():
    with pytest.raises(UnsupportedMediaError, match=r"of type list .*one image per item"):
        decoded(["a.png", "b.png"])


# Limits


def png_header(width, height):
    """Makes a PNG that announces a size and has no pixels."""

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", b""), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*chunk) for chunk in chunks)


def test_pixel_limit_is_read_from_the_header():
    with pytest.raises(MediaLimitError, match=r"100000 x 100000 .*178956970 are allowed"):
        decoded(png_header(100_000, 100_000))
    with pytest.raises(MediaLimitError, match="max_image_pixels"):
        DECODER.peek(png_header(100_000, 100_000), MediaLimits())


def test_large_but_allowed_images_give_no_warning():
    blob = png_header(12_000, 12_000)  # over Pillow's warning threshold, under ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert DECODER.peek(blob, MediaLimits()).size == (12_000, 12_000)
        with pytest.raises(MediaError, match="PNG image is"):
            decoded(blob)


def test_limits_hold_for_every_form(encode, noise):
    limits = replace(MediaLimits(), max_pixels=100)
    image = noise(20, 10)
    for source in (image, encode(image), np.asarray(image), torch.zeros(3, 20, 10)):
        with pytest.raises(MediaLimitError, match="200 pixels, 100 are allowed"):
            decoded(source, limits)
        with pytest.raises(MediaLimitError):
            DECODER.peek(source, limits)
    with pytest.raises(MediaLimitError, match="bytes, 50 are allowed"):
        decoded(encode(image), replace(MediaLimits(), max_bytes=50))


# Faults


@pytest.mark.parametrize("format", sorted({*FORMATS} - {"HEIF"}))  # of HEIF: test_heif.py
def test_truncated_and_damaged_files_are_media_errors(format, encode, noise):
    blob = encode(noise(64, 48), format)
    for cut in (0, 1, 12, 40, len(blob) // 2):
        with pytest.raises(MediaError) as caught:
            decoded(blob[:cut])
        assert "0x" not in str(caught.value)
        assert "BytesIO" not in str(caught.value)


def test_cve_2026_22778_messages_hold_no_addresses():
    for blob in (
        b"\x89PNG\r\n\x1a\n" + b"x" * 50,
        b"\xff\xd8\xff" + b"\0" * 50,
        b"GIF89a",
        b"BM" * 9,
    ):
        with pytest.raises(MediaError) as caught:
            decoded(blob)
        assert " at 0x" not in str(caught.value)
        assert caught.value.__cause__ is None


def test_empty_and_unknown_bytes():
    with pytest.raises(MediaError, match="0 bytes"):
        decoded(b"")
    with pytest.raises(UnsupportedMediaError, match="first bytes"):
        decoded(b"hello world, I am text")


def test_a_closed_image_is_a_media_error(encode):
    image = Image.open(io.BytesIO(encode(Image.new("RGB", (20, 10)))))
    image.close()
    with pytest.raises(MediaError):
        decoded(image)


def test_orientation_forms_other_than_plain_exif(encode):
    image = Image.new("RGB", (20, 10), RED)
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert decoded(encode(image, "JPEG", xmp=xmp)).size == (10, 20)
    assert decoded(encode(image, "WEBP", xmp=xmp)).size == (10, 20)
    exif = Image.Exif()
    exif[0x0112] = 6
    profile = PngInfo()
    profile.add_text("Raw profile type exif", "\nexif\n      26\n" + exif.tobytes().hex())
    assert decoded(encode(image, "PNG", pnginfo=profile)).size == (10, 20)
    changed = Image.new("RGB", (20, 10))
    changed.getexif()[0x0112] = 6
    assert decoded(changed).size == (10, 20)


class TestIsolation:
    """A file decoded in a worker process has the same pixels and errors."""

    @pytest.fixture
    def decoder(self):
        found = ImageDecoder()
        yield found
        found.close()

    @pytest.mark.one_is_quick
    @pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
    def test_same_image(self, decoder, noise, encode, limits, format):
        blob = encode(noise(40, 30), format)
        apart = replace(limits, isolation="process")
        ours, theirs = decoder.decode(blob, limits), decoder.decode(blob, apart)
        assert ours.image.tobytes() == theirs.image.tobytes()
        assert (ours.size, ours.digest) == (theirs.size, theirs.digest)
        assert decoder.peek(blob, apart) == decoder.peek(blob, limits)

    def test_same_draft(self, decoder, noise, encode, limits):
        blob = encode(noise(640, 480), "JPEG")
        apart = replace(limits, isolation="process")
        made = [
            decoder.decode(blob, chosen, lambda height, width: (100, 130))
            for chosen in (limits, apart)
        ]
        assert made[0].image.size == made[1].image.size == (160, 120)
        assert made[0].draft_of == made[1].draft_of == (640, 480)
        assert made[0].image.tobytes() == made[1].image.tobytes()

    def test_same_errors(self, decoder, noise, encode, limits):
        tight = replace(limits, max_pixels=1000)
        for blob, chosen in ((b"", limits), (b"no image", limits), (encode(noise(40, 30)), tight)):
            found = []
            for isolation in ("thread", "process"):
                with pytest.raises(MediaError) as caught:
                    decoder.decode(blob, replace(chosen, isolation=isolation))
                found.append((caught.type, str(caught.value)))
            assert found[0] == found[1]
