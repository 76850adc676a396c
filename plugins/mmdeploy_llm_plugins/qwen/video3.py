"""Qwen3-VL's video processor: bounds the pixels of a whole video, and writes the time of every two
frames as text between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import fit_frames
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.processor import GROUP, VideoPlan
from mmdeploy_llm_processors.video.select import first_to_last
from mmdeploy_llm_processors.video.timed import TimedVideoProcessor

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import Timeline

from .video import QwenVideoProcessor

HALF = (0.5, 0.5, 0.5)
# transformers' rule for the pixels of a frame, if the checkpoint caps them.
MAX_FRAME_TOKENS = 768
FLOOR = 1.05


class Qwen3VideoProcessor(TimedVideoProcessor):
    """Qwen3-VL: two frames a second, 4 to 768 in all, two frames per patch."""

    token = QwenVideoProcessor.token
    # As in the processor that the model was published with, the text between the frames has its own
    # start and end tokens, so the first marker removes those around the placeholder.
    markers = ("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    default = replace(
        QwenVideoProcessor.default, min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32
    )
    normalisation = MappingProxyType({"image_mean": HALF, "image_std": HALF})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        file = checkpoint.video_preprocessor
        self._frame_tokens = None
        if file.get("cap_pixels_per_frame"):
            self._frame_tokens = file.get("max_video_tokens") or MAX_FRAME_TOKENS

    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """See select.first_to_last."""
        return first_to_last(timeline, options)

    def target_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """See fit_video."""
        return fit_video(height, width, num_frames, self._image_options, self._frame_tokens)

    def times(self, plan: VideoPlan) -> Sequence[float]:
        """Returns the means of the times of every two frames."""
        times = [*map(plan.timeline.time_of, plan.indices)]
        times += times[-1:] * (plan.num_frames - len(times))
        return [
            (first + last) / 2 for first, last in zip(times[::GROUP], times[1::GROUP], strict=True)
        ]

    def stamped(self, times: Sequence[float], num_tokens: int) -> str:
        """Returns "<0.2 seconds><|vision_start|><|video_pad|>...<|vision_end|>" for each time."""
        tokens = self.token * num_tokens
        return "".join(
            f"<{time:.1f} seconds><|vision_start|>{tokens}<|vision_end|>" for time in times
        )


def fit_video(
    height: int,
    width: int,
    num_frames: int,
    options: ImageOptions,
    frame_tokens: int | None = None,
) -> tuple[int, int]:
    """Returns (height, width) of a frame after resizing: multiples of `factor`, with the area of
    all frames together within the bounds and nearly the same aspect.

    frame_tokens: upper bound of a frame's tokens, or None. A single frame counts as two. Source:
    transformers' Qwen3VLVideoProcessor.resize. Raises MediaError for frames more than 200 times as
    long as wide.
    """
    num_frames = max(num_frames, GROUP)
    max_area = options.max_pixels
    if frame_tokens is not None:
        share = min(frame_tokens * options.factor**2, options.max_pixels // num_frames)
        max_area = max(share, int(options.min_pixels * FLOOR)) * num_frames
    return fit_frames(height, width, num_frames, options, max_area=max_area)
