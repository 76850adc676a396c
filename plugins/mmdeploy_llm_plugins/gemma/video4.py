"""The video processor of Gemma 4: 32 frames, each with its time as text before it and at most 70
tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mmdeploy_llm_processors.image.embedded import check_names, embedded_grid
from mmdeploy_llm_processors.video.options import PREFIX, VideoOptions
from mmdeploy_llm_processors.video.processor import VideoPlan, VideoProcessor, given_times
from mmdeploy_llm_processors.video.select import spread_frames

from mmdeploy_llm.errors import CheckpointError, ConfigError
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm.media import Timeline

from .image4 import (
    BUDGET,
    END,
    START,
    budget_pixels,
    cell_of,
    check_budget,
    fit_budget,
)

CELL = 48  # pixels along a side of a token
NUM_FRAMES = 32


class Gemma4VideoProcessor(VideoProcessor):
    """Gemma 4: 32 frames, evenly spread, or video_fps frames a second within min_frames and
    max_frames. video_max_soft_tokens is the budget of a frame; see Gemma4ImageProcessor."""

    token = "<|video|>"
    markers = ("<|video|>",)
    default = VideoOptions(
        fps=-1.0,
        min_frames=1,
        max_frames=NUM_FRAMES,
        target_frames=NUM_FRAMES,
        min_pixels=1,
        max_pixels=70 * CELL * CELL,
        draw_on_frames=False,
    )
    has_one_size = True
    frames_per_patch = 1
    frames_per_token = 1
    normalisation = MappingProxyType({"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        cell = cell_of(checkpoint.config)
        given, name, area = dict(options), PREFIX + BUDGET, PREFIX + "max_pixels"
        if name in given:
            if area in given:
                raise ConfigError(f"mm_processor_kwargs sets {area} and {name}; remove one")
            given[area] = budget_pixels(
                given.pop(name), cell, ConfigError, f"mm_processor_kwargs: {name}"
            )
        elif BUDGET in checkpoint.video_preprocessor and area not in given:
            budget = checkpoint.video_preprocessor[BUDGET]
            where = f"video_preprocessor_config.json: {BUDGET}"
            given[area] = budget_pixels(budget, cell, CheckpointError, where)
        super().__init__(checkpoint, given)
        check_budget(self.options.max_pixels // cell**2, checkpoint.config)

    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """See select.spread_frames."""
        return spread_frames(timeline, options)

    def target_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """See fit_budget."""
        return fit_budget(height, width, self._image_options)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. options: `timestamps`, the seconds of each frame, which the prompt
        shows to the model."""
        check_names(self.kind, options, "timestamps")
        made = embedded_grid(self.kind, grid, self._image_options)
        steps = made.grid_thw[0] if made.grid_thw is not None else 0
        times = given_times(options, steps)
        return replace(made, prompt_text=self._stamped(times, made.num_tokens // steps))

    def written(self, plan: VideoPlan) -> str:
        """Returns "00:03 <|image><|video|>...<image|>" for every frame, with its minutes and
        seconds."""
        factor = self._image_options.factor
        times = [*map(plan.timeline.time_of, plan.indices)]
        return self._stamped(times, (plan.height // factor) * (plan.width // factor))

    def _stamped(self, times: Sequence[float], num_tokens: int) -> str:
        """Returns the text of a video, with num_tokens placeholders after each time."""
        tokens = f"{START}{self.token * num_tokens}{END}"
        return " ".join(f"{int(time // 60):02d}:{int(time % 60):02d} {tokens}" for time in times)
