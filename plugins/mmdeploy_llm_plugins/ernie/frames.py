"""Chooses the frames of a video by the rules, and with the errors, of FastDeploy: `target_frames`
frames, or `fps` frames a second within min_frames .. max_frames."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from mmdeploy_llm_processors.video.options import VideoOptions
from mmdeploy_llm_processors.video.select import one_of_each

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media import Timeline


def choose_frames(timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
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
        return one_of_each(timeline.num_frames, options.target_frames, options.frames_sample, rng)
    if options.fps <= 0:
        raise MediaError(
            "Must provide either positive target_fps or positive target_frames: fps is "
            f"{options.fps:g}, target_frames is {options.target_frames}"
        )
    wanted = int(timeline.duration * options.fps)
    allowed = min(max(wanted, options.min_frames), options.max_frames)
    if wanted != allowed:
        return one_of_each(timeline.num_frames, allowed, options.frames_sample, rng)
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
