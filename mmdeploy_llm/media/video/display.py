"""Shows decoded frames as players do: upright, in the shape and the colours that a file says."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import av
from av.sidedata.sidedata import Type as SideData
from av.video.reformatter import Colorspace, Interpolation, VideoReformatter
from PIL import Image, ImageOps

from mmdeploy_llm.media.image.hdr import HLG, PQ, to_sdr
from mmdeploy_llm.media.image.modes import on_white

MATRIX = struct.Struct("=9i")  # rows (a, b, u), (c, d, v), (x, y, w); a to d are 16.16 fixed point
UPRIGHT = (1, 0, 0, 1)
TOLERANCE = math.sin(math.radians(1))  # a matrix may be a degree away from a right angle
UNSPECIFIED = 2  # matrix coefficients, ITU-T H.273
# A frame without a matrix that is larger than those of standard television has BT.709's: the rule
# of mpv.
LARGEST_SD = 1279, 576
MAX_STRETCH = 10  # a pixel that is longer than so many times its width is a mistake

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


class Display:
    """Shows the frames of a video, for one thread. aspect: width of a pixel by its height. size:
    (width, height) of the video, within which later frames of another size are shown. is_mapped:
    whether high dynamic range becomes that of models."""

    def __init__(self, aspect: Fraction, size: tuple[int, int], *, is_mapped: bool) -> None:
        self._aspect, self._size, self._is_mapped = aspect, size, is_mapped
        self._converter = VideoReformatter()  # keeps its tables from frame to frame

    def shown(self, frame: av.VideoFrame) -> Image.Image:
        """Returns the frame as it is displayed, in RGB; transparency becomes white. Other angles
        than right ones are not turned. A frame of another shape has black bars, as in players."""
        width, height = stretched(frame.width, frame.height, self._aspect)
        is_stored = (width, height) == (frame.width, frame.height)
        has_alpha = _has_alpha(frame)
        made = self._converter.reformat(
            frame,
            width,
            height,
            "rgba" if has_alpha else "rgb24",
            src_colorspace=_colorspace(frame),
            interpolation=None if is_stored else Interpolation.BICUBIC,
            threads=1,
        )
        image = Image.fromarray(made.to_ndarray())
        image = on_white(image) if has_alpha else image
        if self._is_mapped and frame.color_trc in (PQ, HLG):
            image = to_sdr(image, frame.color_trc)
        turn = TRANSPOSES.get(_signs(frame))
        image = image.transpose(turn) if turn is not None else image
        return image if image.size == self._size else ImageOps.pad(image, self._size)


def shown_size(frame: av.VideoFrame, aspect: Fraction) -> tuple[int, int]:
    """Returns (width, height) of what a Display shows, without converting a pixel. aspect: as of
    Display."""
    width, height = stretched(frame.width, frame.height, aspect)
    return (height, width) if _signs(frame)[0] == 0 else (width, height)


def stretched(width: int, height: int, aspect: Fraction) -> tuple[int, int]:
    """Returns the size in square pixels: the shorter side of a pixel grows, as in mpv and Chrome,
    so that no detail is lost."""
    if aspect > 1:
        return round(width * aspect), height
    return width, round(height / aspect)


def pixel_aspect(stated: Fraction | None) -> Fraction:
    """Returns the width of a pixel by its height; 1 where a file does not say it, or says what
    cannot be."""
    if not stated or not Fraction(1, MAX_STRETCH) <= stated <= MAX_STRETCH:
        return Fraction(1)
    return Fraction(stated)


def _colorspace(frame: av.VideoFrame) -> Colorspace | None:
    """Returns the matrix of a frame that does not say its own; None: as it says, or as FFmpeg
    does, which is BT.601."""
    if frame.colorspace != UNSPECIFIED or frame.format.is_rgb:
        return None
    if frame.color_trc in (PQ, HLG):
        return Colorspace.BT2020
    width, height = LARGEST_SD
    return Colorspace.ITU709 if frame.width > width or frame.height > height else None


def _has_alpha(frame: av.VideoFrame) -> bool:
    return frame.format.has_palette or any(part.is_alpha for part in frame.format.components)


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
