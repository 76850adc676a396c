"""Colours of images that have ICC profiles. Right values follow from the profiles' numbers, which
icc_profiles.py writes, and from littleCMS as Pillow offers it."""

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media import decode_image
from mmdeploy_llm.media.image.decode import ImageDecoder
from mmdeploy_llm.media.image.thumbnail import Thumbnails
from mmdeploy_llm.media.isolation import Workers
from mmdeploy_llm.media.video.opening import open_video
from tests.media.icc_profiles import (
    ADOBE,
    P3,
    SRGB,
    cmyk_profile,
    gray_profile,
    rgb_profile,
    srgb_curve,
    srgb_light,
)
from tests.media.tiff_files import tiff

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 256, (24, 40, 3), np.uint8)
COLOURS[0, :3] = (0, 255, 0), (255, 255, 255), (0, 0, 0)
PROFILES = {
    "Adobe RGB": (rgb_profile(ADOBE, 563 / 256), ADOBE, 563 / 256),
    "Display P3": (rgb_profile(P3, None), P3, None),
    "sRGB of gamma 1.8": (rgb_profile(SRGB, 1.8), SRGB, 1.8),
    "red and blue exchanged": (rgb_profile(SRGB[:, ::-1], None), SRGB[:, ::-1], None),
}
STORED, AS_STORED = MediaLimits(), MediaLimits(pixels="as-stored")
BUILT_IN = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def shown(source, limits=None):
    return np.asarray(decode_image(source, limits).image).astype(int)


def encoded(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def by_formula(colours, colorants, gamma):
    """Returns sRGB's values of colours, without rounding."""
    values = colours / 255
    light = srgb_light(values) if gamma is None else values**gamma
    return srgb_curve(np.clip(light @ colorants.T @ np.linalg.inv(SRGB).T, 0, 1)) * 255


@pytest.mark.parametrize("name", PROFILES)
def test_colours_become_those_of_srgb(name):
    profile, colorants, gamma = PROFILES[name]
    found = shown(encoded(Image.fromarray(COLOURS), icc_profile=profile))
    wanted = by_formula(COLOURS, colorants, gamma)
    far = np.abs(found - wanted)
    assert far.max() <= 3, "gamma 1.8 is steep in the dark"
    assert far.mean() < 0.5
    assert np.abs(found - COLOURS).max() > 15, "the profile matters"
    own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    theirs = ImageCms.profileToProfile(
        Image.fromarray(COLOURS), own, ImageCms.createProfile("sRGB"), outputMode="RGB"
    )
    assert np.abs(found - np.asarray(theirs)).max() <= 1


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_every_format_and_path(format, isolation):
    if format == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow was built without AVIF")
    profile = PROFILES["Adobe RGB"][0]
    options = {"lossless": True} if format == "WEBP" else {}
    image = Image.new("RGB", (40, 24), (60, 200, 60))
    blob = encoded(image, format, icc_profile=profile, **options)
    plain = np.asarray(Image.open(io.BytesIO(blob)).convert("RGB"))
    wanted = by_formula(plain, ADOBE, 563 / 256)
    limits = MediaLimits(isolation=isolation)
    assert np.abs(shown(blob, limits) - wanted).max() <= 2
    assert np.abs(shown(Image.open(io.BytesIO(blob)), limits) - wanted).max() <= 2
    stored = replace(limits, pixels="as-stored")
    assert (shown(blob, stored) == plain).all()
    assert (shown(Image.open(io.BytesIO(blob)), stored) == plain).all()


def test_previews_animations_and_lists_of_frames():
    profile = PROFILES["red and blue exchanged"][0]
    red, blue = Image.new("RGB", (32, 32), (255, 0, 0)), Image.new("RGB", (32, 32), (0, 0, 255))
    blob = encoded(red, icc_profile=profile)
    [preview] = Thumbnails(32).previews(Thumbnails(32).decode(blob, STORED), {})
    pixel = Image.open(io.BytesIO(preview)).getpixel((9, 9))
    assert pixel[2] > 240
    assert pixel[0] < 20
    film = encoded(red, save_all=True, append_images=[blue], icc_profile=profile, duration=100)
    for source in (film, [blob, blob]):
        for limits, wanted in ((STORED, (0, 0, 255)), (AS_STORED, (255, 0, 0))):
            [frame] = open_video(source, limits).read([0])
            assert frame.getpixel((9, 9)) == wanted


def test_orientation_transparency_palettes_and_drafts_go_with_it():
    profile = PROFILES["red and blue exchanged"][0]
    image = Image.new("RGB", (40, 20), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_image(encoded(image, icc_profile=profile, exif=exif)).image
    assert turned.size == (20, 40)
    assert turned.getpixel((0, 0)) == (0, 0, 255)
    for mode in ("RGBA", "RGBa", "P"):
        half = Image.new("RGBA", (4, 4), (255, 0, 0, 128)).convert(mode if mode != "P" else "RGBA")
        half = half.quantize() if mode == "P" else half
        half.info["icc_profile"] = profile
        red, green, blue = decode_image(half).image.getpixel((0, 0))
        assert (abs(red - 127) < 3, abs(green - 127) < 3, blue) == (True, True, 255), mode
    large = encoded(Image.new("RGB", (640, 480), (255, 0, 0)), "JPEG", icc_profile=profile)
    made = ImageDecoder().decode(large, STORED, lambda height, width: (60, 80))
    assert made.image.size < (640, 480)
    assert made.image.getpixel((0, 0))[2] > 250


@pytest.mark.parametrize("mode", ["L", "LA", "1", "I;16"])
def test_profiles_of_grays(mode):
    """A gray of gamma 1 is light itself: its middle is bright in sRGB."""
    values = np.array([[0, 64, 128, 255]], np.uint8)
    image = Image.fromarray(values)
    if mode == "I;16":
        image = Image.fromarray(values.astype(np.uint16) * 257)
    elif mode != "L":
        image = image.convert(mode)
    plain = np.asarray(image.convert("L")) if mode != "I;16" else values
    for profile in (gray_profile(1.0), rgb_profile(SRGB, 1.0)):
        image.info["icc_profile"] = profile
        found = decode_image(image)
        wanted = srgb_curve(plain / 255) * 255
        assert np.abs(np.asarray(found.image)[..., 0] - wanted).max() <= 1
        assert found.notes == ()


def test_profiles_of_inks():
    corners = np.zeros((2, 2, 2, 2, 3))
    corners[..., 0] = 100 * (1 - np.indices((2, 2, 2, 2)).sum(0) / 4)  # L by the sum of inks
    profile = cmyk_profile(corners)
    image = Image.merge("CMYK", [Image.new("L", (8, 8), v) for v in (255, 255, 0, 0)])
    jpeg = encoded(image, "JPEG", icc_profile=profile, quality=100)
    for source in (jpeg, tiff(np.asarray(image), 5, tags={34675: (7, profile)})):
        found = shown(source)
        light = ((50 + 16) / 116) ** 3
        assert np.abs(found - srgb_curve(np.array(light)) * 255).max() <= 3
        assert shown(source, AS_STORED)[0, 0].tolist() == pytest.approx([0, 0, 255], abs=3)


@pytest.mark.parametrize("profile", [BUILT_IN, rgb_profile(SRGB, None)], ids=["lcms", "tables"])
def test_profiles_that_are_srgb_change_nothing(profile):
    assert (shown(encoded(Image.fromarray(COLOURS), icc_profile=profile)) == COLOURS).all()
    image = Image.fromarray(COLOURS)
    image.info["icc_profile"] = profile
    assert decode_image(image).image is image


BROKEN = {
    "empty": b"",
    "short": b"profile",
    "zeros": bytes(3000),
    "cut off": PROFILES["Adobe RGB"][0][:200],
    "other bytes": PROFILES["Adobe RGB"][0][:128] + b"\xff" * 300,
    "a space of light": PROFILES["Adobe RGB"][0].replace(b"RGB XYZ ", b"XYZ XYZ "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_profile_is_told_and_does_not_fail(name):
    image = Image.fromarray(COLOURS)
    image.info["icc_profile"] = BROKEN[name]
    for source in (image, encoded(image, icc_profile=BROKEN[name])):
        found = decode_image(source)
        assert (np.asarray(found.image) == COLOURS).all()
        wanted = "the image's colour profile cannot be read; its colours were taken as sRGB"
        assert found.notes == ((wanted,) if name != "empty" else ())
        assert decode_image(source, AS_STORED).notes == ()


def test_what_is_a_guess_of_an_animation_is_told_from_a_process_too():
    red, blue = Image.new("RGB", (32, 32), (255, 0, 0)), Image.new("RGB", (32, 32), (0, 0, 255))
    rest = {"save_all": True, "append_images": [blue], "duration": 100}
    films = {
        "profile cannot be read": encoded(red, icc_profile=BROKEN["zeros"], **rest),
        "those of P3,": after_header(encoded(red, **rest), b"cICP", bytes((12, 13, 0, 1))),
    }
    workers = Workers()
    try:
        for words, film in films.items():
            for pool in (None, workers):
                opened = open_video(film, STORED, pool)
                assert len(list(opened.read([0, 1]))) == 2
                [told] = opened.notes
                assert words in told
                opened = open_video(film, AS_STORED, pool)
                assert len(list(opened.read([0, 1]))) == 2
                assert opened.notes == ()
    finally:
        workers.close()


def test_an_animation_of_high_dynamic_range_becomes_that_of_sdr():
    gray, other = Image.new("RGB", (16, 16), (100, 100, 100)), Image.new("RGB", (16, 16))
    film = encoded(gray, save_all=True, append_images=[other], duration=100)
    film = after_header(film, b"cICP", bytes((9, 16, 0, 1)))
    [frame] = open_video(film, STORED).read([0])
    expected = 255 * (light_of_pq(100 / 255) / 203) ** (1 / 2.4)
    assert np.abs(np.asarray(frame).astype(int) - expected).max() <= 4


def test_another_gamma_of_a_loaded_image_is_told():
    image = Image.open(io.BytesIO(with_chunk(b"gAMA", struct.pack(">I", 100_000))))
    assert "PNG's chunks gAMA or cHRM" in decode_image(image).notes[0]
    assert decode_image(image, AS_STORED).notes == ()


def test_a_profile_of_another_kind_is_told():
    inks, gray = cmyk_profile(np.zeros((2, 2, 2, 2, 3))), gray_profile(1.0)
    for profile in (inks, gray):
        found = decode_image(encoded(Image.fromarray(COLOURS), icc_profile=profile))
        assert (np.asarray(found.image) == COLOURS).all()
        assert "of another kind than its pixels" in found.notes[0]


# Keys of caches


def test_what_looks_different_has_another_digest():
    """Equal bytes, other meaning: mode, shape, dtype, order, palette, profile, options."""
    values = RANDOM.integers(0, 2, 48 * 4, np.uint8)
    palette = Image.frombytes("P", (12, 16), values.tobytes())
    palettes = []
    for colours in ([0, 0, 0, 255, 0, 0], [0, 0, 0, 0, 255, 0]):
        palettes.append(palette.copy())
        palettes[-1].putpalette(colours)
    profiled = Image.frombytes("RGB", (8, 8), values.tobytes())
    profiled.info["icc_profile"] = PROFILES["Adobe RGB"][0]
    turned = Image.frombytes("RGB", (8, 8), values.tobytes())
    turned.getexif()[0x0112] = 3
    sources = [
        *(Image.frombytes(mode, size, values.tobytes()) for mode, size in (
            ("RGB", (8, 8)), ("RGB", (4, 16)), ("RGB", (16, 4)), ("HSV", (8, 8)), ("YCbCr", (8, 8)),
            ("L", (12, 16)), ("CMYK", (8, 6)), ("RGBA", (6, 8)), ("I;16", (8, 12)),
            ("I;16B", (8, 12)), ("F", (6, 8)))),
        *palettes, profiled, turned,
        values.reshape(12, 16) * 1, values.reshape(8, 24) * 1,
        values.view(np.uint16).reshape(8, 12), values.view(">u2").reshape(8, 12),
        values.view(np.bool_).reshape(12, 16),
    ]  # fmt: skip
    decoder, limits = ImageDecoder(), MediaLimits()
    looks, digests = {}, {}
    for source in sources:
        made = decoder.decode(source, limits)
        look = made.size, made.image.tobytes()
        assert decoder.digest(source, limits) == made.digest
        assert looks.setdefault(made.digest, look) == look
        assert digests.setdefault(look, made.digest) == made.digest
    assert len(looks) >= 18
    blob = encoded(profiled, icc_profile=PROFILES["Adobe RGB"][0])
    for isolation in ("thread", "process"):
        found = {
            decoder.decode(source, MediaLimits(pixels=pixels, isolation=isolation)).digest
            for source in (blob, profiled)
            for pixels in ("square", "as-stored")
        }
        assert len(found) == 4
    assert len({decoder.digest(blob, it) for it in (STORED, AS_STORED)}) == 2
    decoder.close()


def with_chunk(kind, data):
    """Returns the PNG of a gray picture with a chunk before its pixels."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (100, 100, 100)).save(buffer, "PNG")
    return after_header(buffer.getvalue(), kind, data)


def after_header(png, kind, data):
    chunk = struct.pack(">I", len(data)) + kind + data
    chunk += struct.pack(">I", zlib.crc32(kind + data))
    return png[:33] + chunk + png[33:]


def light_of_pq(code):
    """SMPTE ST 2084: cd/m2 of a code value from 0 to 1."""
    root = code ** (1 / 78.84375)
    return 10_000 * (max(root - 0.8359375, 0) / (18.8515625 - 18.6875 * root)) ** (1 / 0.1593017578)


def light_of_hlg(code):
    """ITU-R BT.2100, code values up to 0.5: cd/m2 of grey on a display of 1,000."""
    return 1000 * (code**2 / 3) ** 1.2


@pytest.mark.parametrize(("transfer", "light"), [(16, light_of_pq), (18, light_of_hlg)])
@pytest.mark.parametrize("name", ["PNG", "AVIF"])
def test_images_of_high_dynamic_range_become_those_of_sdr(name, transfer, light):
    blob = with_chunk(b"cICP", bytes((9, transfer, 0, 1)))
    if name == "AVIF":
        if not features.check("avif"):
            pytest.skip("this Pillow was built without AVIF")
        buffer = io.BytesIO()
        Image.new("RGB", (16, 16), (100, 100, 100)).save(buffer, "AVIF", quality=100)
        before, box, after = buffer.getvalue().partition(b"colrnclx")
        blob = before + box + struct.pack(">HH", 9, transfer) + after[4:]
    found = decode_image(blob)
    expected = 255 * (light(100 / 255) / 203) ** (1 / 2.4)  # dark enough not to be compressed
    assert np.abs(np.asarray(found.image).astype(int) - expected).max() <= 4
    assert found.notes == ()
    stored = decode_image(blob, AS_STORED)
    assert np.abs(np.asarray(stored.image).astype(int) - 100).max() <= 2
    assert stored.digest != found.digest


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        (b"cICP", bytes((12, 13, 0, 1)), "those of P3,"),
        (b"cICP", bytes((12, 16, 0, 1)), "those of P3 in high dynamic range,"),
        (b"gAMA", struct.pack(">I", 100_000), "PNG's chunks gAMA or cHRM"),
        (
            b"cHRM",
            struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000),
            "PNG's chunks gAMA or cHRM",
        ),
        (b"cICP", bytes((1, 13, 0, 1)), None),
        (b"gAMA", struct.pack(">I", 45_455), None),
        (
            b"cHRM",
            struct.pack(">8I", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000),
            None,
        ),
    ],
)
def test_other_colours_without_a_profile_are_told(kind, data, words):
    found = decode_image(with_chunk(kind, data))
    assert np.asarray(found.image)[0, 0].tolist() == [100, 100, 100]
    assert len(found.notes) == (words is not None)
    assert words is None or words in found.notes[0]
    assert decode_image(with_chunk(kind, data), AS_STORED).notes == ()
