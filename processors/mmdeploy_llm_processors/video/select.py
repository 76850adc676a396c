"""Selects frames of a video by rules that several families share; a family's own rule stands beside
its video processor."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.media import Timeline

from .options import VideoOptions


def first_to_last(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns frame indices, ascending; if there are two or more, the first and last are included.

    target_frames frames, or as many as `fps` makes in min_frames .. max_frames. Raises MediaError.
    """
    total = timeline.num_frames
    if options.target_frames > 0:
        count = options.target_frames
        if count > total:
            raise MediaError(too_few(count, total))
    elif options.fps > 0:
        wanted = int(total / timeline.fps * options.fps)
        count = min(max(wanted, options.min_frames), options.max_frames, total)
    else:
        raise MediaError(no_rate(options))
    indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return indices


def thinned(indices: list[int], count: int) -> list[int]:
    """Returns at most `count` of the frames, evenly spread; the first and last are among them."""
    if count >= len(indices):
        return indices
    places: list[int] = np.linspace(0, len(indices) - 1, count).round().astype(int).tolist()
    return [indices[place] for place in places]


def one_of_each(total: int, count: int, mode: str, rng: np.random.Generator) -> list[int]:
    """Returns one frame of each of `count` equal intervals; all frames if there are fewer."""
    cuts = np.linspace(0, total, min(count, total) + 1).astype(int).tolist()
    intervals = [(first, last - 1) for first, last in pairwise(cuts)]
    if mode == "leading":
        return [first for first, _ in intervals]
    if mode == "middle":
        return [(first + last) // 2 for first, last in intervals]
    return [int(rng.integers(first, last + 1)) for first, last in intervals]


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
        raise MediaError(no_rate(options))
    count = min(count, total)
    # As in the source: the float steps of torch.arange decide which frames are used.
    indices: list[int] = torch.arange(0, total, total / count).int().tolist()
    return indices[:count]


def too_few(wanted: int, total: int) -> str:
    return (
        f"target_frames = {wanted}, but the video has {total} frames; lower it or give fps instead"
    )


def no_rate(options: VideoOptions) -> str:
    return (
        "Must provide either positive fps or positive target_frames: fps is "
        f"{options.fps:g}, target_frames is {options.target_frames}"
    )


def chosen_frames(timeline: Timeline, options: VideoOptions) -> list[int]:
    """Returns all frames of the caller's list, or max_frames of them, evenly spread."""
    rng = np.random.default_rng(0)
    return one_of_each(timeline.num_frames, options.max_frames, "leading", rng)
