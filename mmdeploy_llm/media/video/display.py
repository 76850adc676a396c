"""Turns a decoded frame the way its display matrix asks for, mirrored ones (selfies) included."""

from __future__ import annotations

import math
import struct

import av
from av.sidedata.sidedata import Type as SideData
from PIL import Image

MATRIX = struct.Struct("=9i")  # rows (a, b, u), (c, d, v), (x, y, w); a to d are 16.16 fixed point
UPRIGHT = (1, 0, 0, 1)
TOLERANCE = math.sin(math.radians(1))  # a matrix may be a degree away from a right angle

# Signs of (a, b, c, d) -> what shows the frame so. A stored pixel (x, y) is displayed at
# (a x + c y, b x + d y): ISO/IEC 14496-12, section 6.2.2, and FFmpeg's autorotate.
TRANSPOSES = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
}


def upright(frame: av.VideoFrame) -> Image.Image:
    """Returns the frame as it is displayed, in RGB. Other angles than right ones are not turned."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = TRANSPOSES.get(_signs(frame))
    return image.transpose(turn) if turn is not None else image


def is_sideways(frame: av.VideoFrame) -> bool:
    """Returns whether width and height of the frame change places when it is displayed."""
    return _signs(frame)[0] == 0


def _signs(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Returns the signs of (a, b, c, d), each column scaled to length 1 first.

    Without a matrix, with one that is singular, or with one that is no right angle: UPRIGHT.
    """
    data = frame.side_data.get(SideData.DISPLAYMATRIX)
    if data is None or len(bytes(data)) < MATRIX.size:
        return UPRIGHT
    a, b, _, c, d, *_ = MATRIX.unpack_from(bytes(data))
    first, second = math.hypot(a, c), math.hypot(b, d)
    if not first or not second:
        return UPRIGHT
    signs = tuple(map(_sign, (a / first, b / second, c / first, d / second)))
    return signs if signs in TRANSPOSES else UPRIGHT


def _sign(value: float) -> int:
    return 0 if abs(value) < TOLERANCE else int(math.copysign(1, value))
