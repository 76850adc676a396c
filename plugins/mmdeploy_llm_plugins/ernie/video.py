"""The video processor of ERNIE 4.5 VL: frames with their time written on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdeploy_llm_processors.image.patches import fit_size
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.processor import VideoPlan, VideoProcessor
from PIL import Image, ImageDraw, ImageFont

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import Timeline

from .frames import choose_frames
from .image import clamp_aspect

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


class ErnieVideoProcessor(VideoProcessor):
    """ERNIE 4.5 VL: two frames a second, 16 to 180 in all, each with its time written on it."""

    token = "<|VIDEO_PLACEHOLDER|>"
    markers = ("<|video@placeholder|>", "<|VIDEO_PLACEHOLDER|>")
    default = VideoOptions(min_pixels=299 * 28 * 28, max_pixels=1196 * 28 * 28)
    frames_per_patch = 1

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self._stamp = Stamp(checkpoint.folder, self.options.font)

    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """See frames.choose_frames."""
        return choose_frames(timeline, options, digest)

    def prepared(self, frame: Image.Image, index: int, plan: VideoPlan) -> Image.Image:
        """Writes its time on the frame unless draw_on_frames is off."""
        if not plan.options.draw_on_frames:
            return frame
        return self._stamp.draw(frame, plan.timeline.time_of(index))

    def target_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Returns (height, width) after resizing; an aspect over 200 is reduced to 200."""
        height, width = clamp_aspect(height, width, self._image_options.factor)
        return fit_size(height, width, self._image_options)
