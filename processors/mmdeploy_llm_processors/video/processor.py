"""The base of video processors, which turn frames into patch rows and a grid.

open --> choose frames --> for each frame: read, stamp, resize, patchify

Only the chosen frames are decoded, and only one group of them is held in memory.
"""

from __future__ import annotations

import copy
import math
import numbers
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image

from mmdeploy_llm.errors import ConfigError, MediaError, MediaLimitError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor, PixelKernels
from mmdeploy_llm.media import (
    OpenVideo,
    Patchifier,
    Timeline,
    Workers,
    constant_timeline,
    open_video,
    small_jpeg,
)
from mmdeploy_llm_processors.image.budget import within
from mmdeploy_llm_processors.image.embedded import check_names, embedded_grid
from mmdeploy_llm_processors.image.largest import blank
from mmdeploy_llm_processors.image.options import ImageOptions, merge_size, normalisation
from mmdeploy_llm_processors.image.patches import fit_size, resize

from .options import PREFIX, VideoOptions, engine_options, item_options
from .select import chosen_frames, thinned

_OF_FRAMES = frozenset({"source_fps", "times"})  # options of a list of frames
GROUP = 2  # frames that are merged into one token
# Of a whole video, in the examples of one family's authors, which docs/media.md names; the others
# have fewer.
AUTO_TOKENS = 8192
LEAST_STEP = 64  # tokens of a step before a budget takes frames away
MAX_PREVIEWS = 8
PREVIEW_SIZE = 200  # pixels of the longer side
_LONG_VIDEO = 100_000  # frames, more than an hour


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoItem:
    """An opened video, and the limits it was opened with."""

    video: OpenVideo
    limits: MediaLimits

    @property
    def digest(self) -> str:
        """Hash of the video's content."""
        return self.video.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPlan:
    """The plan for a video: its options, its timeline, the frames to use and their size.

    indices: the chosen frames, ascending. height, width: pixels of a frame after resizing. group:
        frames that are merged into one token.
    """

    options: VideoOptions
    timeline: Timeline
    indices: Sequence[int]
    height: int
    width: int
    group: int

    @property
    def num_frames(self) -> int:
        """Number of frames to process; the last one is used twice if the number is odd and frames
        are merged by twos."""
        return len(self.indices) + len(self.indices) % self.group

    @property
    def seconds(self) -> float:
        """The time from the first frame to the end of the last."""
        return covered_seconds(self.timeline, self.indices)


def covered_seconds(timeline: Timeline, indices: Sequence[int]) -> float:
    """Returns the seconds from the first of these frames to the end of the last."""
    after = indices[-1] + 1
    end = timeline.time_of(after) if after < timeline.num_frames else timeline.end
    return max(0.0, end - timeline.time_of(indices[0]))


class VideoOpener(MediaProcessor):
    """Opens videos for a processor that chooses frames of them. Safe for use from several
    threads."""

    kind = "video"

    def __init__(self) -> None:
        self._workers = Workers()

    def close(self) -> None:
        """Ends the decoder processes."""
        self._workers.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        is_apart = limits.isolation != "thread"
        return self._workers.max_seconds(limits) if is_apart else limits.decode_timeout

    def decode(self, source: Any, limits: MediaLimits) -> VideoItem:
        """Opens bytes, a list of frames, an array or a tensor. Of a file it reads the header and
        the times of the frames, in a worker process unless `limits.isolation` is "thread"."""
        workers = None if limits.isolation == "thread" else self._workers
        return VideoItem(video=open_video(source, limits, workers), limits=limits)


class VideoProcessor(VideoOpener):
    """The video processor of all families. Safe for use from several threads.

    frames_per_patch, frames_per_token: frames that a patch row holds, and that a token stands for.
    normalisation: the family's default image_mean and image_std if they are not CLIP's.
    has_one_size: frames have the size that the family chooses, so a budget leaves fewer of them.
    checkpoint: provides its video processor's file and the vision tower's patch sizes.
    options: the engine's mm_processor_kwargs. Raises ConfigError and CheckpointError for wrong
    options.
    """

    auto_tokens: int | None = AUTO_TOKENS
    default: ClassVar[VideoOptions]
    has_one_size: ClassVar[bool] = False
    frames_per_patch: ClassVar[int]
    frames_per_token: ClassVar[int] = GROUP
    normalisation: ClassVar[Mapping[str, tuple[float, float, float]]] = MappingProxyType({})

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.options = engine_options(self.default, checkpoint.video_preprocessor, options)
        patch, merge = self.patches_of(checkpoint.config)
        self._image_options = ImageOptions(
            min_pixels=self.options.min_pixels,
            max_pixels=self.options.max_pixels,
            patch_size=patch,
            merge_size=merge,
            temporal_patch_size=self.frames_per_patch,
            **{**self.normalisation, **normalisation(checkpoint.video_preprocessor)},
        )
        self._patches = Patchifier(self._image_options)
        self._max_tokens: int | None = None  # of the budget
        self._has_own_least = f"{PREFIX}min_pixels" in options
        if any(name.startswith(PREFIX) for name in options):
            self._check_choice()

    def _check_choice(self) -> None:
        """Raises ConfigError for options with which even a long video could not be used."""
        timeline = constant_timeline(64, 64, _LONG_VIDEO, 24.0)
        try:
            self.choose(timeline, self.options, "0" * 64)
        except MediaError as error:
            raise ConfigError(f"mm_processor_kwargs: no video can be used: {error}") from error

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See MediaProcessor. Frames get smaller, down to LEAST_STEP tokens for a step, then fewer;
        where they have one size, fewer only. A budget never raises what the options allow."""
        factor = self._image_options.factor
        if self._has_own_least and self._image_options.min_pixels > tokens * factor**2:
            raise ConfigError(
                f"video_min_pixels = {self._image_options.min_pixels} asks for more than the "
                f"{tokens} tokens of video_tokens; remove one of them"
            )
        limited = copy.copy(self)
        limited._max_tokens = tokens
        return limited

    def use_kernels(self, kernels: PixelKernels) -> None:
        """See MediaProcessor."""
        self._patches.use_kernels(kernels)

    def process(self, item: VideoItem, options: Mapping[str, Any]) -> MediaInput:
        """Returns `pixels` float32 [num_patches, patch_dim] and the grid of patches (time, rows,
        columns), and `extras`. key: hash of the item's digest, the chosen frames and all resolved
        options.
        """
        plan, patch = self._plan(item, options), self._image_options.patch_size
        steps = plan.num_frames // self.frames_per_patch
        rows, columns = plan.height // patch, plan.width // patch
        patch_dim = 3 * self.frames_per_patch * patch * patch
        out = np.empty((steps, rows * columns, patch_dim), dtype=np.float32)
        frames = self._pixels(item.video, plan)
        for step in range(steps):
            group = list(islice(frames, self.frames_per_patch))
            self._patches.fill(group, out[step])
        # Exhausts the iterator, which frees the decoder process for the next video.
        assert next(frames, None) is None
        pixels = torch.from_numpy(out).view(-1, patch_dim)
        return MediaInput(
            kind=self.kind,
            tensors={"pixels": pixels, **self.extras(plan)},
            num_tokens=self._num_tokens(plan),
            key=self._key(item, plan),
            grid_thw=(steps, rows, columns),
            prompt_text=self.written(plan),
            num_frames=len(plan.indices),
            seconds=plan.seconds,
            notes=tuple(dict.fromkeys((*plan.timeline.notes, *item.video.notes))),
        )

    def count_tokens(self, item: VideoItem, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of the video, without decoding a frame."""
        return self._num_tokens(self._plan(item, options))

    def prompt_text(self, item: VideoItem, options: Mapping[str, Any]) -> str | None:
        """Returns the video's text in the prompt, without decoding a frame."""
        return self.written(self._plan(item, options))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. The grid is needed."""
        check_names(self.kind, options)
        steps = self.frames_per_token // self.frames_per_patch
        return embedded_grid(self.kind, grid, self._image_options, steps)

    def largest(self, max_tokens: int) -> MediaInput:
        """Builds square frames of the largest area, reduced to max_tokens, with the number of
        frames that makes most tokens: fewer than allowed where the area of all frames is bounded.
        """
        options, group = self._image_options, self.frames_per_token
        max_tokens = min(max_tokens, self._max_tokens or max_tokens)
        max_frames = max(group, self.options.max_frames, self.options.target_frames)
        side = (math.isqrt(options.max_pixels) // options.factor + 1) * options.factor

        def blank_video(num_frames: int) -> MediaInput:
            return blank(
                self.kind,
                *self.target_size(side, side, num_frames),
                options,
                max_tokens,
                num_steps=-(-num_frames // group),
                grid_per_step=group // self.frames_per_patch,
            )

        halvings = range(max_frames.bit_length() - 1)
        return max(
            (blank_video(max_frames >> count) for count in halvings),
            key=lambda item: item.num_tokens,
        )

    def previews(self, item: VideoItem, options: Mapping[str, Any]) -> list[bytes]:
        """Makes JPEGs of at most MAX_PREVIEWS evenly spread frames, as the model gets them."""
        plan = self._plan(item, options)
        count = min(MAX_PREVIEWS, len(plan.indices))
        shown = np.linspace(0, len(plan.indices) - 1, count).round().astype(int).tolist()
        indices = [plan.indices[position] for position in shown]
        return [
            small_jpeg(self.prepared(frame, index, plan), PREVIEW_SIZE)
            for frame, index in zip(item.video.read(indices), indices, strict=True)
        ]

    def patches_of(self, config: Any) -> tuple[int, int]:
        """Returns the pixels of a patch's side and the patches of a token's side."""
        vision = getattr(config, "vision_config", None)
        return getattr(vision, "patch_size", 14), merge_size(vision) or 2

    @abstractmethod
    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """Returns the indices of the frames to use by the family's rule, ascending."""

    def prepared(self, frame: Image.Image, index: int, plan: VideoPlan) -> Image.Image:
        """Changes a frame before it is resized; by default returns it as it is."""
        return frame

    def extras(self, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Returns tensors to add to the pixels."""
        return {}

    def written(self, plan: VideoPlan) -> str | None:
        """See MediaInput.prompt_text."""
        return None

    def target_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Returns (height, width) of a frame after resizing. num_frames: of the chosen frames."""
        return fit_size(height, width, self._image_options)

    def _plan(self, item: VideoItem, given: Mapping[str, Any]) -> VideoPlan:
        options, video = item_options(self.options, given), item.video
        timeline = video.timeline
        if video.has_chosen_frames:
            is_known = "source_fps" in options.given
            timeline = timeline_of_frames(
                timeline, options.source_fps, is_known=is_known, times=options.times
            )
        elif options.times:
            raise MediaError("times is an option of a list of frames; a file says its own")
        if video.has_chosen_frames and not given.keys() - _OF_FRAMES:
            indices = chosen_frames(timeline, options)
        else:
            indices = self.choose(timeline, options, video.digest)
        if len(indices) > item.limits.max_frames:
            raise MediaLimitError(
                f"{len(indices)} frames of the video would be used, {item.limits.max_frames} are "
                "allowed; lower max_frames or fps"
            )
        indices, (height, width) = self._within_budget(timeline, indices)
        return VideoPlan(
            options=options,
            timeline=timeline,
            indices=indices,
            height=height,
            width=width,
            group=self.frames_per_token,
        )

    def _within_budget(
        self, timeline: Timeline, indices: list[int]
    ) -> tuple[list[int], tuple[int, int]]:
        """Returns the frames to use and their (height, width). Raises MediaError for a budget below
        the tokens of one step of frames that have one size."""
        factor, group, most = self._image_options.factor, self.frames_per_token, self._max_tokens
        size = self.target_size(timeline.height, timeline.width, len(indices))
        one = (size[0] // factor) * (size[1] // factor)
        if most is None or -(-len(indices) // group) * one <= most:
            return indices, size
        steps = most // (one if self.has_one_size else min(one, LEAST_STEP))
        if not steps and self.has_one_size:
            raise MediaError(
                f"video_tokens = {most} is below the {one} tokens of one frame of this model; "
                "raise it"
            )
        indices = thinned(indices, max(1, steps) * group)
        size = self.target_size(timeline.height, timeline.width, len(indices))
        return indices, within(size, factor, most // -(-len(indices) // group))

    def _pixels(self, video: OpenVideo, plan: VideoPlan) -> Iterator[np.ndarray]:
        """Yields plan.num_frames frames at their final size, uint8 [H, W, 3]."""
        options, kernels = self._image_options, self._patches.kernels
        for frame, index in zip(video.read(plan.indices), plan.indices, strict=True):
            ready = self.prepared(frame, index, plan)
            pixels = resize(ready, plan.height, plan.width, options, kernels)
            yield pixels
        if plan.num_frames > len(plan.indices):
            yield pixels

    def _num_tokens(self, plan: VideoPlan) -> int:
        factor = self._image_options.factor
        return plan.num_frames // plan.group * (plan.height // factor) * (plan.width // factor)

    def _key(self, item: VideoItem, plan: VideoPlan) -> str:
        text = (
            f"{type(self).__qualname__}\0{plan.options!r}\0{self._image_options!r}\0"
            f"{list(plan.indices)!r}\0{plan.height}\0{plan.width}\0{item.digest}"
        )
        return blake2b(text.encode(), digest_size=20).hexdigest()


def timeline_of_frames(
    timeline: Timeline, rate: float, *, is_known: bool, times: Sequence[float] = ()
) -> Timeline:
    """Returns the timeline of the caller's frames: at `times` if there are any, else evenly spread.

    rate: frames per second. is_known: the caller has said it. Raises MediaError for another number
    of times than of frames.
    """
    num = timeline.num_frames
    if times:
        if len(times) != num:
            raise MediaError(f"times has {len(times)} numbers, and the video {num} frames")
        return timeline.at(times)
    counted = constant_timeline(timeline.width, timeline.height, num, rate)
    if is_known:
        return counted
    note = (
        f"times of the video's frames are counted, at {rate:g} a second: they came without "
        "source_fps or times"
    )
    return replace(counted, notes=(note,))


def given_times(options: Mapping[str, Any], steps: int) -> list[float]:
    """Returns the option `timestamps` of embeddings, the seconds of each grid step. Raises
    MediaError unless it has one number for each."""
    given = options.get("timestamps")
    if not isinstance(given, (list, tuple)) or len(given) != steps:
        raise MediaError(
            f"video_embeds of this model need 'timestamps', a list with the seconds of each of the "
            f"{steps} grid steps, got {given!r:.80}"
        )
    return [positive_seconds("timestamps", value) for value in given]


def positive_seconds(name: str, value: Any) -> float:
    """Returns the seconds. Raises MediaError unless they are a finite number, not below 0."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise MediaError(f"{name} must be seconds, numbers of 0 or more, got {value!r:.80}")
    return float(value)
