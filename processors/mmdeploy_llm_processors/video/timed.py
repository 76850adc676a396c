"""The video processor of families that write the times of frames into the prompt."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm_processors.image.embedded import check_names, embedded_grid

from .processor import GROUP, VideoPlan, VideoProcessor, given_times


class TimedVideoProcessor(VideoProcessor):
    """Writes the placeholders of each grid step, of GROUP frames, with its time as text."""

    frames_per_patch = GROUP

    @abstractmethod
    def times(self, plan: VideoPlan) -> Sequence[float]:
        """Returns the time of each grid step, in seconds."""

    @abstractmethod
    def stamped(self, times: Sequence[float], num_tokens: int) -> str:
        """Returns the text of a video, with num_tokens placeholders for each time."""

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. options: `timestamps`, the seconds of each grid step, which the
        prompt shows to the model."""
        check_names(self.kind, options, "timestamps")
        made = embedded_grid(self.kind, grid, self._image_options)
        steps = made.grid_thw[0] if made.grid_thw is not None else 0
        times = given_times(options, steps)
        return replace(made, prompt_text=self.stamped(times, made.num_tokens // steps))

    def written(self, plan: VideoPlan) -> str:
        """Returns the stamped text of a video."""
        factor = self._image_options.factor
        num_tokens = (plan.height // factor) * (plan.width // factor)
        return self.stamped(self.times(plan), num_tokens)
