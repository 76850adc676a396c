"""Frames have the colours and the shape that players show: against the formulas of the ITU, and
against how the file was made."""

import io
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.video.opening import open_video

LIMITS = MediaLimits()
WEIGHTS = {"601": (0.299, 0.114), "709": (0.2126, 0.0722), "2020": (0.2627, 0.0593)}  # red, blue
CODES = {"601": 6, "709": 1, "2020": 9, None: 2}  # ITU-T H.273
COLOURS = [
    *((255, 255, 255), (0, 0, 0), (128, 128, 128), (230, 30, 40), (20, 200, 60)),
    *((40, 60, 220), (220, 200, 30), (200, 60, 180)),
]
SIZE = 32  # pixels along the side of a patch of one colour


@pytest.fixture(scope="session")
def videos(load_file):
    return load_file("media/numbered_videos.py")


def coded(colours, matrix, *, is_full, bits):
    """Returns the Y, Cb and Cr planes of patches beside each other, by BT.601, BT.709 or BT.2020,
    each for R'G'B' from 0 to 1."""
    red, blue = WEIGHTS[matrix]
    rgb = np.array(colours) / 255
    luma = rgb @ [red, 1 - red - blue, blue]
    cb, cr = (rgb[:, 2] - luma) / (2 - 2 * blue), (rgb[:, 0] - luma) / (2 - 2 * red)
    unit, largest = 2 ** (bits - 8), 2**bits - 1
    if is_full:
        found = luma * largest, cb * largest + 128 * unit, cr * largest + 128 * unit
    else:
        found = (16 + 219 * luma) * unit, (128 + 224 * cb) * unit, (128 + 224 * cr) * unit
    kind = np.uint8 if bits == 8 else np.uint16
    rounded = (np.clip(np.rint(values), 0, largest).astype(kind) for values in found)
    return [np.repeat(np.tile(values, (SIZE, 1)), SIZE, axis=1) for values in rounded]


def seen(blob, limits=LIMITS):
    [frame] = open_video(blob, limits).read([0])
    return np.asarray(frame).astype(int)


def patches(pixels):
    return pixels[SIZE // 2, SIZE // 2 :: SIZE]


@pytest.mark.parametrize("bits", [8, 10])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("matrix", ["601", "709", "2020"])
def test_matrix_range_and_bits(videos, matrix, is_full, bits):
    planes = coded(COLOURS, matrix, is_full=is_full, bits=bits)
    pix_fmt = "yuv444p" if bits == 8 else "yuv444p10le"
    blob = videos.raw(planes, pix_fmt, matrix=CODES[matrix], is_full=is_full)
    assert np.abs(patches(seen(blob)) - COLOURS).max() <= 3


@pytest.mark.parametrize(
    ("width", "height", "matrix"),
    [
        (256, 32, "601"),
        (720, 576, "601"),
        (1280, 720, "709"),
        (1920, 1080, "709"),
        (720, 608, "709"),
    ],
)
def test_a_video_that_does_not_say_its_matrix(videos, width, height, matrix):
    """Larger than standard television: BT.709's, as in mpv."""
    [planes] = [coded(COLOURS[3:5], matrix, is_full=False, bits=8)]
    large = [np.resize(plane[:1, :1], (height, width)) for plane in planes]
    blob = videos.raw(large, "yuv444p", matrix=2, is_full=False, transfer=2, primaries=2)
    assert np.abs(seen(blob)[0, 0] - COLOURS[3]).max() <= 3


def pq(light):
    """SMPTE ST 2084: cd/m2 to code values from 0 to 1."""
    power = (light / 10_000) ** 0.1593017578125
    return ((0.8359375 + 18.8515625 * power) / (1 + 18.6875 * power)) ** 78.84375


def hlg(scene):
    """ITU-R BT.2100: scene light from 0 to 1 to code values."""
    if scene <= 1 / 12:
        return (3 * scene) ** 0.5
    return 0.17883277 * np.log(12 * scene - 0.28466892) + 0.55991073


def grey_video(videos, codes, transfer):
    colours = [(255 * code,) * 3 for code in codes]
    planes = coded(colours, "2020", is_full=False, bits=10)
    return videos.raw(
        planes, "yuv444p10le", matrix=9, is_full=False, transfer=transfer, primaries=9
    )


def test_light_of_pq_is_mapped(videos):
    """What is darker than 90 cd/m2 is as on a display whose white has 203, by BT.1886; brighter
    light is compressed, and told apart up to 1,000."""
    light = [0.5, 5, 26, 50, 80, 203, 400, 1000]
    found = patches(seen(grey_video(videos, [pq(each) for each in light], 16)))[:, 0]
    expected = [255 * (each / 203) ** (1 / 2.4) for each in light[:5]]
    assert found[:5] == pytest.approx(expected, abs=4)
    assert 190 < found[5] < found[6] < found[7]
    assert found[7] >= 253


def test_code_values_stay_as_stored(videos):
    blob = grey_video(videos, [0.2, 0.5, 0.75], 16)
    found = patches(seen(blob, replace(LIMITS, pixels="as-stored")))[:, 0]
    assert found == pytest.approx([51, 127.5, 191], abs=2)


def test_light_of_hlg_is_mapped(videos):
    """A display of 1,000 cd/m2 shows grey of scene light E at 1,000 E to the power of 1.2."""
    scene = [0.001, 0.02, 0.05, 0.1, 0.13, 0.265, 0.5, 1.0]
    found = patches(seen(grey_video(videos, [hlg(each) for each in scene], 18)))[:, 0]
    expected = [255 * min(1, 1000 * each**1.2 / 203) ** (1 / 2.4) for each in scene[:4]]
    assert found[:4] == pytest.approx(expected, abs=5)
    assert all(np.diff(found) > 0)
    assert found[-1] >= 253


def test_colours_of_wide_gamut_are_those_of_sdr(videos):
    """A colour of BT.709, expressed in BT.2020 and PQ, comes back."""
    colours = np.array([(150, 40, 40), (40, 120, 60), (60, 70, 150), (140, 120, 50)])
    linear = 203 * (colours / 255) ** 2.4
    # ITU-R BT.2087, section 2
    to_2020 = [[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]]
    codes = 255 * pq(linear @ np.array(to_2020).T)
    planes = coded(codes, "2020", is_full=False, bits=10)
    blob = videos.raw(planes, "yuv444p10le", matrix=9, is_full=False, transfer=16, primaries=9)
    assert np.abs(patches(seen(blob)) - colours).max() <= 6


def circle(width, height, aspect):
    """Draws what a circle is in pixels of this width by their height."""
    y, x = np.mgrid[:height, :width]
    inside = ((x - width / 2) * float(aspect)) ** 2 + (y - height / 2) ** 2 < (height / 4) ** 2
    return np.where(inside[..., None], (200, 20, 20), (255, 255, 255)).astype(np.uint8)


def encoded_circle(name, codec, size, aspect, turn=None):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=name) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        if turn:
            stream.set_display_rotation(turn)
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(circle(*size, aspect), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 25)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def box_of(pixels):
    red = (pixels[..., 0] > 150) & (pixels[..., 1] < 100)
    return red.any(0).sum(), red.any(1).sum()


@pytest.mark.parametrize(
    ("name", "codec", "size", "aspect", "shown"),
    [
        ("mp4", "libx264", (720, 576), Fraction(64, 45), (1024, 576)),
        ("mp4", "libx264", (720, 576), Fraction(16, 15), (768, 576)),
        ("mpegts", "mpeg2video", (720, 480), Fraction(8, 9), (720, 540)),
        ("matroska", "libx264", (1440, 1080), Fraction(4, 3), (1920, 1080)),
        ("avi", "mpeg4", (352, 288), Fraction(12, 11), (384, 288)),
        ("mp4", "libx264", (360, 640), Fraction(3, 2), (540, 640)),
        ("mp4", "libx264", (640, 480), Fraction(1), (640, 480)),
    ],
)
def test_a_circle_is_a_circle(name, codec, size, aspect, shown):
    blob = encoded_circle(name, codec, size, aspect)
    opened = open_video(blob, LIMITS)
    assert (opened.timeline.width, opened.timeline.height) == shown
    [frame] = opened.read([1])
    assert frame.size == shown
    width, height = box_of(np.asarray(frame))
    assert width / height == pytest.approx(1, abs=0.03)


def test_a_turned_video_is_stretched_before_it_is_turned(videos):
    blob = encoded_circle("mp4", "libx264", (720, 576), Fraction(64, 45), turn=90)
    opened = open_video(blob, LIMITS)
    assert (opened.timeline.width, opened.timeline.height) == (576, 1024)
    [frame] = opened.read([1])
    assert frame.size == (576, 1024)
    width, height = box_of(np.asarray(frame))
    assert width / height == pytest.approx(1, abs=0.03)


def test_pixels_as_stored():
    blob = encoded_circle("mp4", "libx264", (720, 576), Fraction(64, 45))
    stored = open_video(blob, replace(LIMITS, pixels="as-stored"))
    assert (stored.timeline.width, stored.timeline.height) == (720, 576)
    assert next(iter(stored.read([1]))).size == (720, 576)
    assert stored.digest != open_video(blob, LIMITS).digest


@pytest.mark.parametrize(
    ("codec", "pix_fmt"),
    [("qtrle", "argb"), ("png", "rgba"), ("prores_ks", "yuva444p10le"), ("png", "rgba64be")],
)
def test_transparent_pixels_are_white(codec, pix_fmt):
    pixels = np.zeros((64, 128, 4), np.uint8)
    pixels[:, :64] = (200, 30, 30, 255)
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mov") as file:
        stream = file.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 128, 64, pix_fmt
        if codec == "prores_ks":
            stream.options = {"profile": "4444"}
        frame = av.VideoFrame.from_ndarray(pixels, format="rgba").reformat(format=pix_fmt)
        frame.pts, frame.time_base = 0, Fraction(1, 10)
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    shown = seen(buffer.getvalue())
    assert np.abs(shown[32, 96] - 255).max() <= 2
    assert np.abs(shown[32, 32] - (200, 30, 30)).max() <= 8


def test_a_later_frame_of_another_shape_keeps_it(videos):
    """Recordings of calls change their size: a wide picture, then a tall one, a larger one."""
    buffer = io.BytesIO()
    sizes = ((128, 64), (64, 128), (256, 128))
    with av.open(buffer, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = *sizes[0], "yuv420p"
        for number, (width, height) in enumerate(sizes):
            coder = av.CodecContext.create("libvpx", "w")
            coder.width, coder.height, coder.pix_fmt = width, height, "yuv420p"
            coder.time_base = Fraction(1, 10)
            pixels = np.full((height, width, 3), 255, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            for packet in (*coder.encode(frame), *coder.encode(None)):
                packet.stream = stream
                file.mux(packet)
    wide, tall, large = open_video(buffer.getvalue(), LIMITS).read([0, 1, 2])
    assert wide.size == tall.size == large.size == (128, 64)
    assert np.asarray(wide).min() > 240
    assert np.asarray(large).min() > 240
    bright = np.asarray(tall).max(axis=2) > 127  # 64 x 128 within 128 x 64 is 32 x 64
    assert bright.all(axis=0).sum() == 32
    assert bright.any(axis=0).nonzero()[0].min() == 48
