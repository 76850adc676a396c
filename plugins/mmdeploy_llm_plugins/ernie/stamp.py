"""Writes ERNIE's time stamps: the time of each frame in its corner."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmdeploy_llm.errors import CheckpointError

SHIPPED_FONT = Path(__file__).with_name("Roboto-Regular.ttf")  # Apache License 2.0, Google Inc.
SIZE_FACTOR = 0.1  # font size per shorter side of a frame, and width of the outline per font size
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


def time_text(seconds: float) -> str:
    """Returns text such as "time: 00:01:02.50"."""
    hours, rest = divmod(seconds, 3600)
    minutes, rest = divmod(rest, 60)
    return f"time: {int(hours):02d}:{int(minutes):02d}:{rest:05.2f}"


class Stamp:
    """Writes times onto frames. Source: FastDeploy and transformers' ERNIE 4.5 VL video processor.

    folder: the checkpoint's folder; its font is used if it has one of that name. Raises
    CheckpointError for a font file that cannot be read.
    """

    def __init__(self, folder: Path, font: str) -> None:
        own = folder / Path(font).name
        self._path = own if own.is_file() else SHIPPED_FONT
        try:
            ImageFont.truetype(self._path, 10)
        except OSError as error:
            raise CheckpointError(
                f"the model's font {str(self._path)!r} cannot be read: {error}"
            ) from None

    def draw(self, frame: Image.Image, seconds: float) -> Image.Image:
        """Returns a copy of the frame with the time in its upper left corner, black with a white
        outline."""
        size = int(min(frame.size) * SIZE_FACTOR)
        stamped = frame.copy()
        if size < 1:
            return stamped
        ImageDraw.Draw(stamped).text(
            (0, 0),
            time_text(seconds),
            font=ImageFont.truetype(self._path, size),
            fill=BLACK,
            stroke_width=int(size * SIZE_FACTOR),
            stroke_fill=WHITE,
        )
        return stamped
