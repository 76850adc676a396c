"""Chooses the frames of a video by the rules of transformers' Qwen2-VL video processor: an even
number of frames, evenly spread."""

from __future__ import annotations

import math

import torch
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.select import no_rate, too_few

from mmdeploy_llm.errors import MediaError
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
