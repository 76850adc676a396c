"""Selects the frames of a video that a model gets.

ERNIE   the rules and errors of FastDeploy: `target_frames` frames, or `fps` frames a second within
        min_frames .. max_frames
Qwen    the rules of transformers' Qwen2-VL video processor: an even number of frames, evenly
        spread
Qwen3   the rules of its Qwen3-VL video processor: from the first frame to the last
GLM     the rules of its GLM-4V video processor, `fps` frames a second, and of its GLM-4.6V video
        processor, whose rate falls with the length
Intern  the rule of its InternVL video processor: the middles of equal intervals
Gemma   the rule of its base video processor: a number of frames, evenly spread
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from mmdeploy_llm.errors import MediaError

from .options import VideoOptions
from .timeline import Timeline

GLM_GROUP = 2  # frames that are merged into one token
# GLM-4.6V: seconds that a video lasts at most, and its tokens in time for each second.
GLM46V_RATES = ((30, 3.0), (300, 1.0), (2400, 0.5))


def ernie_frames(timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
    """Returns frame indices, ascending. "rand" is seeded by the content's digest, so the same video
    always has the same frames. Raises MediaError for options that contradict each other."""
    if options.min_frames > options.max_frames:
        raise MediaError(
            f"min_frames = {options.min_frames} must not be larger than max_frames = "
            f"{options.max_frames}"
        )
    rng = np.random.default_rng(int(digest[:16], 16))
    if options.target_frames > 0:
        _check_target(options)
        return _spread(timeline.num_frames, options.target_frames, options.frames_sample, rng)
    if options.fps <= 0:
        raise MediaError(
            "Must provide either positive target_fps or positive target_frames: fps is "
            f"{options.fps:g}, target_frames is {options.target_frames}"
        )
    wanted = int(timeline.duration * options.fps)
    allowed = min(max(wanted, options.min_frames), options.max_frames)
    if wanted != allowed:
        return _spread(timeline.num_frames, allowed, options.frames_sample, rng)
    return _by_rate(timeline, options, rng)


def _check_target(options: VideoOptions) -> None:
    if options.fps >= 0:
        raise MediaError(
            "fps must be negative if target_frames is given: fps is "
            f"{options.fps:g}; give fps=-1 with target_frames={options.target_frames}"
        )
    if options.target_frames < options.min_frames:
        raise MediaError(
            f"target_frames must be larger than min_frames: {options.target_frames} is below "
            f"{options.min_frames}; lower min_frames"
        )
    if options.target_frames > options.max_frames:
        raise MediaError(
            f"target_frames must be smaller than max_frames: {options.target_frames} is over "
            f"{options.max_frames}; raise max_frames"
        )


def _spread(total: int, count: int, mode: str, rng: np.random.Generator) -> list[int]:
    """Returns one frame of each of `count` equal intervals; all frames if there are fewer."""
    cuts = np.linspace(0, total, min(count, total) + 1).astype(int).tolist()
    intervals = [(first, last - 1) for first, last in pairwise(cuts)]
    if mode == "leading":
        return [first for first, _ in intervals]
    if mode == "middle":
        return [(first + last) // 2 for first, last in intervals]
    return [int(rng.integers(first, last + 1)) for first, last in intervals]


def _by_rate(timeline: Timeline, options: VideoOptions, rng: np.random.Generator) -> list[int]:
    """Returns the frames at every 1/fps seconds; "middle" looks half a step later, "rand" at a
    random time within the step."""
    step = 1 / options.fps
    seconds = np.arange(0, timeline.duration, step)
    if options.frames_sample != "leading":
        seconds = seconds + step / 2
    if options.frames_sample == "rand":
        seconds = seconds + (rng.random(len(seconds)) - 0.5) * step
    indices = _nearest(timeline, seconds.tolist())
    return sorted({index for index in indices if 0 <= index < timeline.num_frames})


def _nearest(timeline: Timeline, seconds: Sequence[float]) -> list[int]:
    """Returns the frame nearest to each time in seconds; halves are rounded to the even index."""
    if timeline.is_constant:
        rounded: list[int] = np.rint(np.array(seconds) * timeline.fps).astype(int).tolist()
        return rounded
    return [_nearest_of(timeline.times, second) for second in seconds]


def _nearest_of(times: Sequence[float], second: float) -> int:
    after = bisect.bisect_left(times, second)
    if after in (0, len(times)):
        return min(after, len(times) - 1)
    return after - 1 if second - times[after - 1] <= times[after] - second else after


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
            raise MediaError(_too_few(options.target_frames, total))
    elif options.fps > 0:
        upper = math.floor(min(options.max_frames, total) / group) * group
        wanted = min(max(timeline.duration * options.fps, options.min_frames), upper, total)
        count = math.floor(wanted / group) * group
    else:
        raise MediaError(_no_rate(options))
    count = max(group, count)
    # As in the source: the float steps of torch.arange decide which frames are used.
    indices: list[int] = torch.arange(0, total, total / count).int().tolist()
    return indices


def qwen3_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns frame indices, ascending; if there are two or more, the first and last are included.

    Source: transformers' Qwen3VLVideoProcessor.sample_frames. Raises MediaError.
    """
    total = timeline.num_frames
    if options.target_frames > 0:
        count = options.target_frames
        if count > total:
            raise MediaError(_too_few(count, total))
    elif options.fps > 0:
        wanted = int(total / timeline.fps * options.fps)
        count = min(max(wanted, options.min_frames), options.max_frames, total)
    else:
        raise MediaError(_no_rate(options))
    indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return indices


def glm_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns frame indices, ascending: the first frame at or after every 1/fps seconds, or
    max_frames times evenly spread over a longer video.

    Source: transformers' Glm4vVideoProcessor.sample_frames, whose max_duration is max_frames / fps.
    Raises MediaError.
    """
    if options.target_frames > 0:
        return qwen3_frames(timeline, options)
    if options.fps <= 0:
        raise MediaError(_no_rate(options))
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
    total, longest = timeline.num_frames, GLM46V_RATES[-1][0]
    seconds = min(timeline.duration, longest)
    rate = next(rate for limit, rate in GLM46V_RATES if seconds <= limit) * GLM_GROUP
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


def spread_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns target_frames frame indices, ascending; with fps as many as these make in
    min_frames .. max_frames; all of a shorter video.

    Source: transformers' BaseVideoProcessor.sample_frames, which refuses shorter videos.
    """
    total, count = timeline.num_frames, options.target_frames
    if options.fps > 0:
        wanted = int(timeline.duration * options.fps)
        count = min(max(wanted, options.min_frames), options.max_frames)
    elif count <= 0:
        raise MediaError(_no_rate(options))
    count = min(count, total)
    # As in the source: the float steps of torch.arange decide which frames are used.
    indices: list[int] = torch.arange(0, total, total / count).int().tolist()
    return indices[:count]


def middle_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns target_frames frame indices, ascending, one in the middle of each interval; with fps
    as many as these make in min_frames .. max_frames; all of a shorter video.

    Source: transformers' InternVLVideoProcessor.sample_frames, which refuses shorter videos. Raises
    MediaError.
    """
    total, count = timeline.num_frames, options.target_frames
    if options.fps > 0:
        wanted = int(total / timeline.fps * options.fps)
        count = min(max(wanted, options.min_frames), options.max_frames)
    elif count <= 0:
        raise MediaError(_no_rate(options))
    count = min(count, total)
    # As in the source: the float steps of torch.arange decide which frames are used.
    indices: list[int] = torch.arange(total / count / 2, total, total / count).int().tolist()
    return indices[:count]


def _too_few(wanted: int, total: int) -> str:
    return (
        f"target_frames = {wanted}, but the video has {total} frames; lower it or give fps instead"
    )


def _no_rate(options: VideoOptions) -> str:
    return (
        "Must provide either positive fps or positive target_frames: fps is "
        f"{options.fps:g}, target_frames is {options.target_frames}"
    )


def chosen_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns all frames of the caller's list, or max_frames of them, evenly spread."""
    rng = np.random.default_rng(0)
    return _spread(timeline.num_frames, options.max_frames, "leading", rng)
