"""The video processor of GLM-4V and GLM-4.6V: every two frames are written into the prompt as an
image, with their time after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm_processors.image.patches import fit_frames
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.processor import GROUP, VideoPlan
from mmdeploy_llm_processors.video.timed import TimedVideoProcessor

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm.media import Timeline

from .frames import glm46v_frames, glm_frames

MAX_DURATION = 300  # seconds
MAX_FRAMES = 640  # of GLM-4.6V
UNUSED = ("num_frames", "max_frames", "min_frames")  # in files, but not in the families' rules


class GlmVideoProcessor(TimedVideoProcessor):
    """GLM-4V: two frames a second, 600 at most. GLM-4.6V and GLM-OCR: a rate that falls with the
    length of the video, unless fps or target_frames is given. The bounds of the pixels are those of
    all frames together."""

    token = "<|video|>"
    markers = ("<|video|>",)
    written_token = "<|image|>"
    default = VideoOptions(
        min_frames=1,
        max_frames=2 * MAX_DURATION,
        min_pixels=112 * 112,
        max_pixels=2 * 30000 * 28 * 28,
        draw_on_frames=False,
    )

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._is_46v = is_46v(checkpoint)
        known = dict(checkpoint.video_preprocessor)
        for name in UNUSED:
            known.pop(name, None)
        if self._is_46v:
            known |= {"fps": -1, "max_frames": MAX_FRAMES}
        else:
            seconds = known.get("max_duration") or MAX_DURATION
            known["max_frames"] = int(seconds * (known.get("fps") or self.default.fps))
        super().__init__(replace(checkpoint, video_preprocessor=known), options)

    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """See frames.glm_frames and frames.glm46v_frames."""
        if self._is_46v and options.fps <= 0 and options.target_frames <= 0:
            return glm46v_frames(timeline, options)
        return glm_frames(timeline, options)

    def target_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """See fit_frames; an odd number of frames counts as the next even one."""
        num_frames += num_frames % GROUP
        return fit_frames(height, width, num_frames, self._image_options)

    def times(self, plan: VideoPlan) -> Sequence[float]:
        """Returns the time of the first of every two frames."""
        return [*map(plan.timeline.time_of, plan.indices[::GROUP])]

    def stamped(self, times: Sequence[float], num_tokens: int) -> str:
        """Returns "<|begin_of_image|><|video|>...<|end_of_image|>" before each time: "3" for
        GLM-4V, "3.5 seconds" for GLM-4.6V."""
        tokens = f"<|begin_of_image|>{self.token * num_tokens}<|end_of_image|>"
        written = (f"{time:.1f} seconds" if self._is_46v else str(int(time)) for time in times)
        return "".join(tokens + time for time in written)


def is_46v(checkpoint: Checkpoint) -> bool:
    """Whether the files of the checkpoint name the processor of GLM-4.6V; if they name none, its
    model decides."""
    video, image = checkpoint.video_preprocessor, checkpoint.preprocessor
    names = (
        video.get("video_processor_type"),
        video.get("processor_class"),
        image.get("processor_class"),
        checkpoint.read_json("processor_config.json").get("processor_class"),
        getattr(checkpoint.config, "model_type", None),
    )
    name = next((name for name in names if isinstance(name, str)), "")
    return name.lower().startswith(("glm46v", "glm_ocr"))
