"""Encodes videos whose frames show their own number, in blocks that survive every codec, so that
the right frame of a moment is read from the pixels that come back."""

import io
from fractions import Fraction

import av
import numpy as np

WIDTH, HEIGHT = 128, 64
NUM_BITS = 8  # a frame is two rows of four blocks, white for 1


def numbered(number, width=WIDTH, height=HEIGHT):
    """Draws RGB uint8 [height, width, 3] that shows a number below 256."""
    pixels = np.full((height, width, 3), 20, np.uint8)
    for bit in range(NUM_BITS):
        row, column = divmod(bit, 4)
        if number >> bit & 1:
            pixels[
                row * height // 2 : (row + 1) * height // 2,
                column * width // 4 : (column + 1) * width // 4,
            ] = 235
    return pixels


def number_of(image):
    """Reads the number that an image shows."""
    grey = np.asarray(image).astype(float).mean(axis=2)
    height, width = grey.shape
    number = 0
    for bit in range(NUM_BITS):
        row, column = divmod(bit, 4)
        block = grey[
            row * height // 2 + height // 8 : (row + 1) * height // 2 - height // 8,
            column * width // 4 + width // 16 : (column + 1) * width // 4 - width // 16,
        ]
        number |= int(block.mean() > 127) << bit
    return number


def encoded(
    name, codec, *, ticks, rate=10, gop=8, b_frames=0, container=None, aspect=None, **options
):
    """Encodes a frame for each tick of 1 / rate seconds, which shows its place among them."""
    settings = {"bf": b_frames, "sc_threshold": 0} if codec in ("libx264",) else {}
    if codec in ("mpeg4", "mpeg2video"):
        settings = {"bf": b_frames}
    if codec == "libx265":
        params = f"bframes={b_frames}:log-level=none:keyint={gop}:min-keyint={gop}:scenecut=0"
        settings = {"x265-params": params}
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=name, options=container or {}) as file:
        stream = file.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.gop_size = WIDTH, HEIGHT, gop
        stream.pix_fmt = {"mjpeg": "yuvj420p", "prores_ks": "yuv422p10le"}.get(codec, "yuv420p")
        stream.options = {key: str(value) for key, value in {**settings, **options}.items()}
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        for number, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(numbered(number), format="rgb24")
            frame.pts, frame.time_base = tick, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def without_first(blob, num, name):
    """Returns the file without its first `num` packets, as a recording that begins anywhere."""
    buffer = io.BytesIO()
    with av.open(io.BytesIO(blob)) as source, av.open(buffer, "w", format=name) as file:
        stream = file.add_stream_from_template(source.streams.video[0])
        for place, packet in enumerate(source.demux(source.streams.video[0])):
            if packet.size and place >= num:
                packet.stream = stream
                file.mux(packet)
    return buffer.getvalue()


def raw(planes, pix_fmt, *, matrix, is_full, transfer=1, primaries=1, name="matroska"):
    """Stores planes [height, width] of code values without loss, in FFV1. matrix, transfer,
    primaries: code points of ITU-T H.273; 2: not said."""
    buffer = io.BytesIO()
    height, width = planes[0].shape
    with av.open(buffer, "w", format=name) as file:
        stream = file.add_stream("ffv1", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        context = stream.codec_context
        context.colorspace, context.color_range = matrix, 2 if is_full else 1
        context.color_trc, context.color_primaries = transfer, primaries
        frame = av.VideoFrame(width, height, pix_fmt)
        for plane, values in zip(frame.planes, planes, strict=True):
            length = plane.line_size // values.itemsize
            padded = np.zeros((values.shape[0], length), values.dtype)
            padded[:, : values.shape[1]] = values
            plane.update(padded.tobytes())
        frame.pts, frame.time_base = 0, Fraction(1, 10)
        frame.colorspace, frame.color_range = matrix, 2 if is_full else 1
        frame.color_trc, frame.color_primaries = transfer, primaries
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()
