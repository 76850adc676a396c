"""The images, videos and sounds of Qwen2.5-Omni and Qwen3-Omni, and videos with their sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import torch
from mmdeploy_llm_plugins.transformers_media.sound.processor import AnyAudioProcessor
from mmdeploy_llm_processors.video.options import PREFIX
from mmdeploy_llm_processors.video.processor import GROUP, VideoItem, VideoPlan

from mmdeploy_llm.errors import ConfigError, MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits
from mmdeploy_llm.media import OpenSound

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
class OmniVideo:
    """A video, and its sound; None for a list of frames."""

    video: VideoItem
    sound: OpenSound | None

    @property
    def digest(self) -> str:
        """Hash of the video's content."""
        return self.video.digest


class OmniVideoProcessor(QwenVideoProcessor):
    """What the videos of both have in common: frames without text between them, and with the option
    use_audio_in_video the sound of the video, ordered by time. A video without a sound track is
    then its frames alone, as in transformers.

    chunk_seconds: seconds that come in turn, frames then sound; None: token by token.
    sound_marks: the texts around a sound.
    """

    chunk_seconds: ClassVar[float | None]
    sound_marks: ClassVar[tuple[str, str]]

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        checkpoint = _thinker(checkpoint)
        given = dict(options)
        self._uses_sound = _as_bool(given.pop(PREFIX + USE_SOUND, False), ConfigError)
        super().__init__(checkpoint, given)
        self._sounds = OmniAudioProcessor(checkpoint, {})
        self._position_rate = checkpoint.config.position_id_per_seconds

    def close(self) -> None:
        """Ends the decoder processes."""
        self._sounds.close()
        super().close()

    def decode(self, source: Any, limits: MediaLimits) -> Any:
        """See VideoProcessor; the sound is decoded where it is used."""
        video = super().decode(source, limits)
        is_file = isinstance(source, (bytes, bytearray, memoryview))
        sound = self._sounds.decode(source, limits) if is_file else None
        return OmniVideo(video=video, sound=sound)

    def extras(self, plan: VideoPlan) -> dict[str, torch.Tensor]:
        """Returns the seconds between two steps of the grid: those of the option fps, as
        transformers computes them."""
        fps = plan.options.fps if plan.options.fps > 0 else self.default.fps
        return {SECONDS: torch.tensor(GROUP / fps)}

    def process(self, item: OmniVideo, options: Mapping[str, Any]) -> MediaInput:
        """See VideoProcessor."""
        uses_sound, others = self._split(options)
        made = super().process(item.video, others)
        samples = self._heard(item) if uses_sound else None
        if samples is None:
            return made
        sound = self._sounds.prepare(samples, {})
        order = self._order(made, sound.text.count(self._sounds.token))
        digest = blake2b(f"{made.key}\0{USE_SOUND}".encode(), digest_size=20)
        return replace(
            made,
            tensors={**made.tensors, **sound.tensors, IS_SOUND: order},
            num_tokens=len(order),
            key=digest.hexdigest(),
            prompt_text=self._text(len(order)),
            other_tokens=((self._sounds.token, tuple(order.nonzero()[:, 0].tolist())),),
        )

    def count_tokens(self, item: OmniVideo, options: Mapping[str, Any]) -> int:
        """See VideoProcessor."""
        uses_sound, others = self._split(options)
        count = super().count_tokens(item.video, others)
        samples = self._heard(item) if uses_sound else None
        if samples is None:
            return count
        return count + self._sounds.text(len(samples), {}).count(self._sounds.token)

    def prompt_text(self, item: OmniVideo, options: Mapping[str, Any]) -> str | None:
        """See MediaProcessor."""
        uses_sound, others = self._split(options)
        if not uses_sound or self._heard(item) is None:
            return super().prompt_text(item.video, others)
        return self._text(self.count_tokens(item, options))

    def previews(self, item: OmniVideo, options: Mapping[str, Any]) -> Sequence[bytes]:
        """See VideoProcessor."""
        return super().previews(item.video, self._split(options)[1])

    def _split(self, options: Mapping[str, Any]) -> tuple[bool, Mapping[str, Any]]:
        given = options.get(USE_SOUND, self._uses_sound)
        others = {name: value for name, value in options.items() if name != USE_SOUND}
        return _as_bool(given, MediaError), others

    def _heard(self, item: OmniVideo) -> np.ndarray | None:
        """Returns the samples of the sound; None for a video without one."""
        if item.sound is None:
            return None
        try:
            return self._sounds.content_of(item.sound, {})
        except UnsupportedMediaError:
            return None

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


def _chunks(times: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the number of the chunk of each token, as transformers' get_chunked_index cuts them:
    a token that is beyond the next chunk begins it all the same."""
    found, chunk = [], 0
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
    normalisation: ClassVar[Mapping[str, Any]] = {"image_mean": HALF, "image_std": HALF}
