"""The images, videos and sounds of Qwen2.5-Omni and Qwen3-Omni, and videos with their sound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from mmdeploy_llm_processors.video.options import PREFIX
from mmdeploy_llm_processors.video.processor import GROUP, VideoItem, VideoPlan

from mmdeploy_llm.errors import ConfigError, MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits
from mmdeploy_llm.media import OpenSound
from mmdeploy_llm_plugins.transformers_media.sound.processor import AnyAudioProcessor

from .image import Qwen3ImageProcessor, QwenImageProcessor
from .omni import IS_SOUND, thinker_of
from .video import SECONDS, QwenVideoProcessor
from .video3 import HALF

USE_SOUND = "use_audio_in_video"


def _thinker(checkpoint: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with the config of its thinker."""
    return replace(checkpoint, config=thinker_of(checkpoint.config))


class Qwen25OmniImageProcessor(QwenImageProcessor):
    """Qwen2.5-Omni: as Qwen2.5-VL."""

    token = "<|IMAGE|>"
    markers = ("<|IMAGE|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(_thinker(checkpoint), options)


class Qwen3OmniImageProcessor(Qwen3ImageProcessor):
    """Qwen3-Omni: as Qwen3-VL."""

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(_thinker(checkpoint), options)


class OmniAudioProcessor(AnyAudioProcessor):
    """Both: what transformers' processor makes of a sound."""

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(_thinker(checkpoint), options)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OmniVideo(VideoItem):
    """A video with its sound, which is decoded when it is used; None for a list of frames."""

    sound: OpenSound | None


class OmniVideoProcessor(QwenVideoProcessor):
    """Makes frames without text between them, and with the option use_audio_in_video the sound of
    the video too, ordered by time. A video without a sound track is then its frames alone, as in
    transformers. A budget holds for both together.

    chunk_seconds: seconds that come in turn, frames then sound; None: token by token.
    sound_marks: the texts around a sound.
    """

    chunk_seconds: ClassVar[float | None]
    sound_marks: ClassVar[tuple[str, str]]

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        checkpoint, given = _thinker(checkpoint), dict(options)
        self._uses_sound = _as_bool(given.pop(PREFIX + USE_SOUND, False), ConfigError)
        super().__init__(checkpoint, given)
        # Found when the first sound is used: most videos are used without.
        self._sounds = cache(lambda: OmniAudioProcessor(checkpoint, {}))
        self._position_rate = getattr(checkpoint.config, "position_id_per_seconds", 0)

    def decode(self, source: Any, limits: MediaLimits) -> VideoItem:
        """See VideoProcessor."""
        video = super().decode(source, limits)
        sound = None
        if isinstance(source, (bytes, bytearray, memoryview)):
            workers = None if limits.isolation == "thread" else self._workers
            sound = OpenSound(bytes(source), video.digest, limits, workers)
        return OmniVideo(video=video.video, limits=limits, sound=sound)

    def extras(self, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Returns the seconds between two steps of the grid: those of the option fps, as
        transformers computes them."""
        fps = plan.options.fps if plan.options.fps > 0 else self.default.fps
        return {SECONDS: torch.tensor(GROUP / fps)}

    def process(self, item: VideoItem, options: Mapping[str, Any]) -> MediaInput:
        """See VideoProcessor."""
        samples, others = self._heard(item, options)
        if samples is None:
            return super().process(item, others)
        sound = self._sounds().prepare(samples, {})
        count = sound.text.count(self._sounds().token)
        made = QwenVideoProcessor.process(self._beside(count), item, others)
        order = self._order(made, count)
        tensors = {name: torch.as_tensor(value) for name, value in sound.tensors.items()}
        digest = blake2b(f"{made.key}\0{USE_SOUND}".encode(), digest_size=20)
        return replace(
            made,
            tensors={**made.tensors, **tensors, IS_SOUND: order},
            num_tokens=len(order),
            key=digest.hexdigest(),
            prompt_text=self._text(len(order)),
            notes=(*made.notes, *_notes_of_sound(item)),
            other_tokens=((self._sounds().token, tuple(order.nonzero()[:, 0].tolist())),),
        )

    def count_tokens(self, item: VideoItem, options: Mapping[str, Any]) -> int:
        """See VideoProcessor."""
        samples, others = self._heard(item, options)
        if samples is None:
            return super().count_tokens(item, others)
        count = self._sounds().text(len(samples), {}).count(self._sounds().token)
        return count + QwenVideoProcessor.count_tokens(self._beside(count), item, others)

    def prompt_text(self, item: VideoItem, options: Mapping[str, Any]) -> str | None:
        """See MediaProcessor."""
        samples, others = self._heard(item, options)
        if samples is None:
            return super().prompt_text(item, others)
        return self._text(self.count_tokens(item, options))

    def previews(self, item: VideoItem, options: Mapping[str, Any]) -> list[bytes]:
        """See VideoProcessor."""
        return super().previews(item, self._split(options)[1])

    def _split(self, options: Mapping[str, Any]) -> tuple[bool, Mapping[str, Any]]:
        given = options.get(USE_SOUND, self._uses_sound)
        others = {name: value for name, value in options.items() if name != USE_SOUND}
        return _as_bool(given, MediaError), others

    def _heard(
        self, item: VideoItem, options: Mapping[str, Any]
    ) -> tuple[np.ndarray | None, Mapping[str, Any]]:
        """Returns the samples of the sound, None where there is none or it is not wanted, and the
        options of the frames."""
        uses_sound, others = self._split(options)
        sound = item.sound if isinstance(item, OmniVideo) else None
        if not uses_sound or sound is None:
            return None, others
        try:
            return self._sounds().content_of(sound, {}), others
        except UnsupportedMediaError:
            return None, others

    def _beside(self, num_sound: int) -> Self:
        """Returns the processor of frames beside a sound of so many tokens. Raises MediaError where
        the budget is used up by the sound."""
        if self._max_tokens is None:
            return self
        if num_sound >= self._max_tokens:
            raise MediaError(
                f"the sound of the video has {num_sound} tokens, and video_tokens allows "
                f"{self._max_tokens} for both: raise it, or leave {USE_SOUND} out"
            )
        return self.with_budget(self._max_tokens - num_sound)

    def _text(self, num_tokens: int) -> str:
        begin, end = self.sound_marks
        return f"{begin}{self.token * num_tokens}{end}"

    def _order(self, made: MediaInput, num_sound: int) -> torch.Tensor:
        """Returns which tokens of the item are the sound's, [tokens]: frames come before the sound
        of their time."""
        frames = made.grid_thw[0] if made.grid_thw is not None else 0
        times = torch.arange(frames) * float(made.tensors[SECONDS]) * self._position_rate
        seen = times.repeat_interleave(made.num_tokens // frames).double()
        heard = torch.arange(num_sound, dtype=torch.float64)
        if self.chunk_seconds is not None:
            length = int(self._position_rate * self.chunk_seconds)
            seen, heard = _chunks(seen, length), _chunks(heard, length)
        # A stable sort: of equal times frames are first.
        order = torch.cat([seen, heard]).argsort(stable=True)
        return order >= len(seen)


def _notes_of_sound(item: VideoItem) -> tuple[str, ...]:
    return item.sound.notes if isinstance(item, OmniVideo) and item.sound else ()


def _chunks(times: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the number of the chunk of each token, as transformers' get_chunked_index cuts them:
    a token that is beyond the next chunk begins it all the same."""
    found: list[int] = []
    chunk = 0
    for time in times.tolist():
        chunk += time >= (chunk + 1) * length and bool(found)
        found.append(chunk)
    return torch.tensor(found, dtype=torch.float64)


def _as_bool(value: Any, error: type[ConfigError] | type[MediaError]) -> bool:
    if not isinstance(value, bool):
        raise error(f"{USE_SOUND} must be True or False, got {value!r:.60}")
    return value


class Qwen25OmniVideoProcessor(OmniVideoProcessor):
    """Qwen2.5-Omni: chunks of two seconds, their frames, then their sound."""

    token = "<|VIDEO|>"
    markers = ("<|VIDEO|>",)
    sound_marks = ("<|audio_bos|>", "<|audio_eos|>")
    chunk_seconds = 2.0


class Qwen3OmniVideoProcessor(OmniVideoProcessor):
    """Qwen3-Omni: each token where its time is."""

    sound_marks = ("<|audio_start|>", "<|audio_end|>")
    chunk_seconds = None
    default = replace(
        QwenVideoProcessor.default, min_pixels=128 * 32 * 32, max_pixels=768 * 32 * 32
    )
    normalisation = MappingProxyType({"image_mean": HALF, "image_std": HALF})
