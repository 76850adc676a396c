"""The video processor of Qwen2-VL and Qwen2.5-VL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from mmdeploy_llm_processors.image.embedded import check_names
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.processor import (
    GROUP,
    VideoPlan,
    VideoProcessor,
    positive_seconds,
)
from mmdeploy_llm_processors.video.select import no_rate, too_few

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.media import Timeline


def qwen_frames(timeline: Timeline, options: VideoOptions, group: int) -> list[int]:
    """Returns frame indices, ascending; their number is a multiple of `group` if there are enough.

    Source: transformers' Qwen2VLVideoProcessor.sample_frames, which divides by zero for a video
    shorter than one group; here all of its frames are used. Raises MediaError.
    """
    total = timeline.num_frames
    if total < group:
        return list(range(total))
    if options.target_frames > 0:
        count = round(options.target_frames / group) * group
        if count > total:
            raise MediaError(too_few(options.target_frames, total))
    elif options.fps > 0:
        upper = math.floor(min(options.max_frames, total) / group) * group
        wanted = min(max(timeline.duration * options.fps, options.min_frames), upper, total)
        count = math.floor(wanted / group) * group
    else:
        raise MediaError(no_rate(options))
    count = max(group, count)
    # As in the source: the float steps of torch.arange decide which frames are used.
    indices: list[int] = torch.arange(0, total, total / count).int().tolist()
    return indices


SECONDS = "second_per_grid"


class QwenVideoProcessor(VideoProcessor):
    """Qwen2-VL and Qwen2.5-VL: two frames a second, 4 to 768 in all, two frames per patch."""

    token = "<|video_pad|>"
    markers: tuple[str, ...] = ("<|video_pad|>",)
    default = VideoOptions(
        min_frames=4,
        max_frames=768,
        min_pixels=128 * 28 * 28,
        max_pixels=768 * 28 * 28,
        draw_on_frames=False,
    )
    frames_per_patch = GROUP

    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """See frames.qwen_frames."""
        return qwen_frames(timeline, options, GROUP)

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. options: `second_per_grid`, the seconds between two grid steps."""
        check_names(self.kind, options, SECONDS)
        made = super().embedded(num_tokens, grid, {})
        if SECONDS not in options:
            return made
        seconds = positive_seconds(SECONDS, options[SECONDS])
        return replace(made, tensors={SECONDS: torch.tensor(seconds)})

    def extras(self, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Returns `second_per_grid`, transformers' second_per_grid_ts."""
        rate = len(plan.indices) / plan.timeline.num_frames * plan.timeline.fps
        return {SECONDS: torch.tensor(GROUP / rate)}
