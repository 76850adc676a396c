"""Encodes videos for the tests: a bar that grows from left to right, one step per frame."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
from PIL import Image

WIDTH, HEIGHT = 160, 96
RED, BLUE = (200, 40, 20), (30, 60, 90)
SILENCE = 1024  # samples in a frame of sound


def frame_of(index, total, width=WIDTH, height=HEIGHT):
    """Draws RGB uint8 [height, width, 3]: red up to index / total of the width, blue after it."""
    pixels = np.full((height, width, 3), BLUE, np.uint8)
    pixels[:, : index * width // total] = RED
    return pixels


def index_of(image, total):
    """Returns the index of a frame, read from the end of the bar."""
    line = np.asarray(image)[image.height // 2, :, 0]
    return round((line > 115).sum() * total / image.width)


def video(
    num=40,
    fps=10,
    *,
    name="mp4",
    codec="libx264",
    gop=12,
    times=None,
    size=(WIDTH, HEIGHT),
    pixels=None,
    **options,
):
    """Encodes a container file. times: milliseconds of each frame, else even steps. pixels: of
    every frame, else a bar that grows."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=name) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size = "yuv420p", gop
        stream.options = {key: str(value) for key, value in options.items()}
        if times:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for index in range(num):
            shown = pixels if pixels is not None else frame_of(index, num, *size)
            frame = av.VideoFrame.from_ndarray(shown, format="rgb24")
            if times:
                frame.pts, frame.time_base = times[index], Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def sound():
    """Encodes a file with sound only."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        for number in range(10):
            samples = np.zeros((1, SILENCE), np.float32)
            frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, number * SILENCE
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def turned(blob, matrix):
    """Rewrites the display matrix (a, b, c, d) in an MP4's track header."""
    place = blob.index(b"tkhd")
    version = blob[place + 4]
    at = place + 4 + (52 if version else 40)
    a, b, c, d = (value << 16 for value in matrix)
    return blob[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + blob[at + 36 :]


def quarters():
    """Draws RGB uint8 [96, 160, 3] that looks different in each of the eight turns."""
    pixels = np.full((HEIGHT, WIDTH, 3), BLUE, np.uint8)
    pixels[: HEIGHT // 2, : WIDTH // 2] = RED
    pixels[HEIGHT // 2 :, : WIDTH // 2] = (20, 200, 40)
    return pixels


def animation(name, num=6, length=200, **options):
    """Encodes an animated GIF, WebP or PNG. length: milliseconds of a frame, or of each frame."""
    frames = [Image.fromarray(frame_of(index, num)) for index in range(num)]
    buffer = io.BytesIO()
    frames[0].save(
        buffer, name, save_all=True, append_images=frames[1:], duration=length, loop=0, **options
    )
    return buffer.getvalue()
