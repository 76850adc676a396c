"""The video processor of InternVL: 8 frames from all over the video, each one tile with its number
before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from mmdeploy_llm_processors.image.budget import too_few
from mmdeploy_llm_processors.image.embedded import check_names
from mmdeploy_llm_processors.image.special_texts import special_texts
from mmdeploy_llm_processors.video.options import PREFIX, VideoOptions
from mmdeploy_llm_processors.video.processor import VideoPlan, VideoProcessor
from mmdeploy_llm_processors.video.select import no_rate

from mmdeploy_llm.errors import ConfigError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm.media import Timeline

from .image import TOKENS, tower_of

NUM_FRAMES = 8


class InternVLVideoProcessor(VideoProcessor):
    """InternVL: 8 frames, or video_fps frames a second within min_frames and max_frames. The
    vision tower sets their size."""

    default = VideoOptions(
        fps=-1.0,
        min_frames=1,
        target_frames=NUM_FRAMES,
        min_pixels=1,
        max_pixels=1,
        draw_on_frames=False,
    )
    has_one_size = True
    frames_per_patch = 1
    frames_per_token = 1

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        for name in (f"{PREFIX}min_pixels", f"{PREFIX}max_pixels"):
            if name in options:
                raise ConfigError(
                    f"mm_processor_kwargs sets {name}, but the frames of this model have one size; "
                    "remove it"
                )
        texts = special_texts(checkpoint, {**TOKENS, "video_token": "<video>"})
        self.token, self.written_token = texts["video_token"], texts["context_image_token"]
        self.markers = (self.token,)
        self._start, self._end = texts["start_image_token"], texts["end_image_token"]
        _, self._side = tower_of(checkpoint.config)
        names = ("fps", "num_frames", "image_mean", "image_std")
        file = checkpoint.video_preprocessor
        own = {name: file[name] for name in names if file.get(name) is not None}
        super().__init__(replace(checkpoint, video_preprocessor=own), options)

    def with_budget(self, tokens: int, *, may_raise: bool = False) -> Self:
        """See VideoProcessor."""
        one = (self._side // self._image_options.factor) ** 2
        if tokens < one:
            raise too_few(tokens, one, "the tokens of one frame of this model", self.kind)
        return super().with_budget(tokens, may_raise=may_raise)

    def patches_of(self, config: Any) -> tuple[int, int]:
        """See VideoProcessor."""
        pixels, _ = tower_of(config)
        return pixels.patch_size, pixels.merge_size

    def choose(self, timeline: Timeline, options: VideoOptions, digest: str) -> list[int]:
        """See middle_frames."""
        return middle_frames(timeline, options)

    def target_size(self, height: int, width: int, num_frames: int) -> tuple[int, int]:
        """Returns the size of the tower's images."""
        return self._side, self._side

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor. Raises MediaError unless the embeddings are those of whole frames."""
        check_names(self.kind, options)
        side = self._side // self._image_options.patch_size
        one = (self._side // self._image_options.factor) ** 2
        made = num_tokens // one, side, side
        if num_tokens % one or not num_tokens or (grid is not None and grid != made):
            raise MediaError(
                f"video_embeds has {num_tokens} rows and the grid {grid}; a video of this model "
                f"has {one} rows for each frame, and needs no grid"
            )
        return MediaInput(
            kind=self.kind,
            tensors={},
            num_tokens=num_tokens,
            key="",
            grid_thw=made,
            prompt_text=self._numbered(made[0], one),
        )

    def written(self, plan: VideoPlan) -> str:
        """Returns "Frame1: <img><video>...</img>" and a line for each further frame."""
        return self._numbered(plan.num_frames, self._num_tokens(plan) // plan.num_frames)

    def _numbered(self, num_frames: int, num_tokens: int) -> str:
        tile = f"{self._start}{self.token * num_tokens}{self._end}"
        return "\n".join(f"Frame{number + 1}: {tile}" for number in range(num_frames))


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
        raise MediaError(no_rate(options))
    count = min(count, total)
    # As in the source: the float steps of torch.arange decide which frames are used.
    indices: list[int] = torch.arange(total / count / 2, total, total / count).int().tolist()
    return indices[:count]
