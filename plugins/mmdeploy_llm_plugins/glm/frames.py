"""Chooses the frames of a video by the rules of transformers: for GLM-4V `fps` frames a second, for
GLM-4.6V at a rate that falls with the length."""

from __future__ import annotations

import math

import numpy as np
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.select import first_to_last, no_rate

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media import Timeline

GROUP = 2  # frames that are merged into one token
# GLM-4.6V: seconds that a video lasts at most, and its tokens in time for each second.
RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))


def glm_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns frame indices, ascending: the first frame at or after every 1/fps seconds, or
    max_frames times evenly spread over a longer video.

    Source: transformers' Glm4vVideoProcessor.sample_frames, whose max_duration is max_frames / fps.
    Raises MediaError.
    """
    if options.target_frames > 0:
        return first_to_last(timeline, options)
    if options.fps <= 0:
        raise MediaError(no_rate(options))
    total, rate = timeline.num_frames, timeline.fps
    count = int(timeline.duration * options.fps)
    if timeline.duration * options.fps > options.max_frames:
        if options.max_frames >= total:
            return list(range(total))
        times = np.linspace(0, timeline.duration, options.max_frames)
        indices = [math.ceil(time * rate) for time in times.tolist()]
    elif count < options.min_frames and options.min_frames > 1:
        return _from_to(0, total - 1, options.min_frames)
    else:
        indices = [math.ceil(index * rate / options.fps) for index in range(max(count, 1))]
    return sorted({min(index, total - 1) for index in indices})


def glm46v_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns frame indices, ascending: two every third of a second, every second or every two
    seconds, by the length of the video, and max_frames at most.

    Source: transformers' Glm46VVideoProcessor.sample_frames, which fails for videos shorter than a
    sixth of a second; here these have one frame.
    """
    total, longest = timeline.num_frames, RATES[-1][0]
    seconds = min(timeline.duration, longest)
    rate = next(rate for limit, rate in RATES if seconds <= limit) * GROUP
    count = max(1, min(int(seconds * rate), options.max_frames))
    if total < count:
        return _from_to(0, total - 1, count)
    indices, time, frame_time = [], 0.0, 1 / timeline.fps
    for index in range(total):
        if index * frame_time >= time:
            time += 1 / rate  # as in the source: the sum of rounded steps
            indices.append(index)
            if time >= int(timeline.duration):
                break
    if len(indices) < count:
        return _from_to(indices[0], indices[-1], count)
    return indices if len(indices) == count else _from_to(0, total - 1, count)


def _from_to(first: int, last: int, count: int) -> list[int]:
    """Returns `count` evenly spread indices, fewer where they would repeat."""
    return sorted({*np.linspace(first, last, count, dtype=int).tolist()})
