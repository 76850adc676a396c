"""Processes videos by the checkpoint's own transformers processor: the frames come from our own
decoder, and torch computes in place of torchvision (operators.py says why)."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers.lending import Lender
from mmdeploy_llm_processors.video.processor import (
    VideoItem,
    VideoOpener,
    covered_seconds,
    timeline_of_frames,
)
from torch import Tensor

from mmdeploy_llm.errors import (
    CheckpointError,
    ConfigError,
    MediaLimitError,
    MMDeployLLMError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import Checkpoint, MediaInput
from mmdeploy_llm.media import OpenVideo, Timeline, constant_timeline
from mmdeploy_llm_plugins.transformers_media.processing import (
    OF_TEXT,
    load_processor,
    placeholder_token,
    tokens_around,
)

from .finding import find_class, stand_in
from .operators import Source
from .sampling import DEFAULT_RATE, SOURCE_RATE, Sampling, engine_options, metadata_of

GRID = "video_grid_thw"
# Writes a token for each query of a Q-Former and frame, and takes videos as if they were images.
QUERIES = ("InstructBlipVideoProcessor",)
# Frames of a video, where the class takes all and its model knows so many.
FEW_FRAMES = {"InstructBlipVideoVideoProcessor": 4}
MAX_TEXTS = 1024  # videos whose prompt text is cached
TRIAL = constant_timeline(48, 40, 8, 2.0)
TRIAL_NAME = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The frames of a video that are used. timeline: of all of its frames."""

    timeline: Timeline
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A processed video: tensors for the model, and its text in the prompt."""

    tensors: Mapping[str, Tensor]
    text: str


class AnyVideoProcessor(VideoOpener):
    """A media processor for videos of any transformers model.

    checkpoint: its processor files and tokenizer are read. options: the engine's
    mm_processor_kwargs; those that begin with "video_" are fields of the video processor. Raises
    UnsupportedMediaError for a model without videos and for one whose video processor needs more
    than is known here, ConfigError for wrong options.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._base, self._fields = find_class(checkpoint)
        if self._base.__name__ in FEW_FRAMES:
            fewer = {"do_sample_frames": True, "num_frames": FEW_FRAMES[self._base.__name__]}
            self._fields = {**self._fields, **fewer}
        component = self._component()
        given = engine_options(self._base, options)
        if given:
            self._fields = {**self._fields, **given}
            component = self._component(ConfigError)
        try:
            self._processor = load_processor(checkpoint, options, component)
        except CheckpointError as error:  # its images may be fine
            raise UnsupportedMediaError(f"with videos, {error}") from error
        self._name = type(self._processor).__name__
        defaults = getattr(self._processor, "videos_kwargs", None) or {}
        self._sampling = Sampling(component, given, defaults)
        self._texts: dict[tuple[Any, ...], str] = {}
        fields = json.dumps(component.to_dict(), sort_keys=True, default=str)
        self._settings = f"{self._name}\0{fields}"
        self._lender: Lender[Any] = Lender(self._copied)
        self._marker = str(
            getattr(self._processor, "video_placeholder_token", None) or self._processor.video_token
        )
        self._read_text(checkpoint.config)

    def process(self, item: VideoItem, options: Mapping[str, Any]) -> MediaInput:
        """Returns the arguments of get_video_features, by name, and the video's prompt text."""
        plan = self._plan(item, options)
        made = self._make(plan, item.video)
        grid = made.tensors.get(GRID)
        text = f"{self._settings}\0{plan!r}\0{item.digest}"
        return MediaInput(
            kind=self.kind,
            tensors=made.tensors,
            num_tokens=made.text.count(self.token),
            key=blake2b(text.encode(), digest_size=20).hexdigest(),
            grid_thw=None if grid is None or len(grid) > 1 else tuple(grid[0].tolist()),
            prompt_text=made.text,
            num_frames=len(plan.indices),
            seconds=covered_seconds(plan.timeline, plan.indices),
            notes=tuple(dict.fromkeys((*plan.timeline.notes, *item.video.notes))),
        )

    def count_tokens(self, item: VideoItem, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of the video, without decoding a frame."""
        return self._text_of(self._plan(item, options)).count(self.token)

    def prompt_text(self, item: VideoItem, options: Mapping[str, Any]) -> str:
        """Returns the video's text in the prompt, without decoding a frame."""
        return self._text_of(self._plan(item, options))

    def _component(self, kind: type[MMDeployLLMError] = UnsupportedMediaError) -> Any:
        """Returns the video processor. Raises `kind` for fields that it cannot use."""
        try:
            return self._base.from_dict(dict(self._fields))
        except Exception as error:  # transformers raises whatever its classes raise
            raise kind(
                f"transformers' {self._base.__name__} cannot be made from {self._fields}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _plan(self, item: VideoItem, given: Mapping[str, Any]) -> _Plan:
        options, video = self._sampling.of_item(given), item.video
        timeline = video.timeline
        if video.has_chosen_frames:
            rate = float(options.get(SOURCE_RATE, DEFAULT_RATE))
            timeline = timeline_of_frames(timeline, rate, is_known=SOURCE_RATE in options)
        is_chosen = video.has_chosen_frames and not set(given) - {SOURCE_RATE}
        indices = self._sampling.choose(timeline, options, is_chosen=is_chosen)
        if len(indices) > item.limits.max_frames:
            raise MediaLimitError(
                f"{len(indices)} frames of the video would be used, {item.limits.max_frames} are "
                "allowed; give fewer by num_frames or fps"
            )
        return _Plan(timeline=timeline, indices=tuple(indices))

    def _text_of(self, plan: _Plan) -> str:
        """Returns the prompt text of a video of this size and length: that of a black one, cached
        by what the text can depend on."""
        timeline = plan.timeline
        size = timeline.width, timeline.height, timeline.num_frames, timeline.duration
        key = (*size, plan.indices)
        text = self._texts.get(key)
        if text is None:
            text = self._make(plan, None).text
            if len(self._texts) < MAX_TEXTS:
                self._texts[key] = text
        return text

    @contextmanager
    def _borrowed(self) -> Iterator[Any]:
        """Lends a processor to one thread."""
        with self._lender.lent() as processor:
            try:
                yield processor
            finally:
                processor.video_processor.source = None

    def _copied(self) -> Any:
        """Returns a copy with a tokenizer of its own, which changes when it is called."""
        processor = copy.copy(self._processor)
        processor.tokenizer = copy.deepcopy(self._processor.tokenizer)
        processor.video_processor = self._component()
        return processor

    def _make(self, plan: _Plan, video: OpenVideo | None) -> _Made:
        """Processes the frames of a plan; black ones without a video."""
        shape = len(plan.indices), 3, plan.timeline.height, plan.timeline.width
        read = None if video is None else partial(_frames, video, plan.indices)
        with self._borrowed() as processor:
            processor.video_processor.source = Source(shape=shape, read=read)
            made = self._called(
                processor, torch.empty(shape, dtype=torch.uint8, device="meta"), plan
            )
            if read is not None and any(_is_meta(value) for value in made.values()):
                # It did not begin by resizing, so it needs all frames at once.
                made = self._called(processor, torch.stack(list(read())), plan)
        start, end = tokens_around(self._processor)
        text = self._replacement(made, len(plan.indices)).replace(self._written, self.token)
        tensors = {name: _as_tensor(value) for name, value in made.items() if name not in OF_TEXT}
        return _Made(
            tensors={name: value for name, value in tensors.items() if value is not None},
            text=f"{start}{text}{end}",
        )

    def _called(self, processor: Any, pixels: Tensor, plan: _Plan) -> Any:
        """Calls transformers' processor. pixels: uint8 [frames, 3, height, width]."""
        options = {
            "do_convert_rgb": False,
            "do_sample_frames": False,
            "input_data_format": "channels_first",
            "video_metadata": [metadata_of(plan.timeline, plan.indices)],
        }
        if self._name in QUERIES:
            return processor.video_processor([pixels], return_tensors="pt", **options)
        return processor(
            videos=[pixels],
            text=[self._marker],
            videos_kwargs=options,
            return_tensors="pt",
            return_text_replacement_offsets=True,
            return_mm_token_type_ids=False,
        )

    def _replacement(self, made: Mapping[str, Any], num_frames: int) -> str:
        """Returns what the processor that has made this writes for a video."""
        if self._name in QUERIES:
            count: int = self._processor.num_query_tokens * num_frames
            return str(self._processor.video_token) * count
        (replaced,) = made["text_replacement_offsets"][0]
        return str(replaced["replacement"])

    def _read_text(self, config: Any) -> None:
        """Finds the token that takes embeddings in the text of a video.

        Where it is that of images, another stands for it until the prompt is complete, so that
        images and videos are told apart. Raises UnsupportedMediaError for a processor that fails
        without torchvision, or whose text of a video depends on more than its size and times.
        """
        name = self._name
        start, end = tokens_around(self._processor)
        self.markers = (f"{start}{self._marker}{end}",)
        self.token = self._written = str(self._processor.video_token)
        plan = _Plan(timeline=TRIAL, indices=tuple(range(TRIAL.num_frames)))
        try:
            text, shown = (self._make(plan, video).text for video in (None, _Noise()))
        except Exception as error:  # transformers' code: anything may come
            raise UnsupportedMediaError(
                f"transformers' {name} fails on a trial video without torchvision "
                f"({type(error).__name__}: {error}); use a plugin made for this model, or give "
                "frames as images"
            ) from error
        if text != shown:
            raise UnsupportedMediaError(
                f"transformers' {name} writes a video by what it shows, so its tokens cannot be "
                "counted; use a plugin made for this model, or give frames as images"
            )
        if self.token in text:
            return
        self._written = placeholder_token(config, self._processor)
        if self._written not in text:
            raise UnsupportedMediaError(
                f"transformers' {name} writes a video as {text[:80]!r}, without a placeholder for "
                "embeddings that is known here; use a plugin made for this model"
            )
        self.written_token = self._written
        self.token = stand_in(self._processor, self._written, name)


class _Noise:
    """A video whose frames differ in every pixel, for the trial."""

    timeline = TRIAL
    digest = TRIAL_NAME
    has_chosen_frames = True
    notes: Sequence[str] = ()

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        """See OpenVideo."""
        rng = np.random.default_rng(0)
        for _ in indices:
            yield rng.integers(0, 256, (TRIAL.height, TRIAL.width, 3), dtype=np.uint8)


def _frames(video: OpenVideo, indices: Sequence[int]) -> Iterator[Tensor]:
    """Yields frames as uint8 [3, height, width]; one that is used twice is read once."""
    unique = sorted(set(indices))
    for index, frame in zip(unique, video.read(unique), strict=True):
        pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1).contiguous()
        yield from [pixels] * indices.count(index)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _as_tensor(value: Any) -> Tensor | None:
    """Returns a tensor of a tensor or of a list of numbers; None for anything else."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, list) and value and all(isinstance(x, (int, float)) for x in value):
        return torch.tensor(value)
    return None
