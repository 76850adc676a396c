"""The video processor of ERNIE 4.5 VL: frames with their time written on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm_processors.image.patches import fit_size
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.processor import VideoPlan, VideoProcessor
from PIL import Image

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import Timeline

from .frames import choose_frames
from .image import clamp_aspect
from .stamp import Stamp


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
