"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: decoders and towers of Qwen2.5-VL and of Qwen3-VL
with experts, and transformers' tower for sounds.

positions   text and sounds count up on all axes; images and frames have time, rows and columns,
            frames by the seconds between them; what follows a medium continues after its highest
            position. A video with its sound holds both, ordered by time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import GridLM, media_grid, to_device
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.transformers_parts.tower import TransformersTower

from .text import IGNORED
from .video import SECONDS
from .vl import RENAMES as VL_RENAMES
from .vl import Qwen25VLForConditionalGeneration
from .vl3 import RENAMES as VL3_RENAMES
from .vl3 import Qwen3VLMoeForConditionalGeneration

IS_SOUND = "is_sound"  # of a video with its sound: which of its tokens are the sound's
RENAMES = (
    (r"^thinker\.", ""),
    (r"^(model\.)?audio_tower\.", "audio.inner."),
)
UNUSED = (r"^(talker|token2wav|code2wav)\.",)


def thinker_of(config: Any) -> Any:
    """Returns the config of the part that writes text."""
    return getattr(config, "thinker_config", config)


def _positions(model: Any, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor:
    """Returns M-RoPE positions [3, num_tokens], as transformers' get_rope_index does."""
    out = torch.empty(3, num_tokens, dtype=torch.int64)
    done, position = 0, 0
    for span in media:
        if span.item.kind == "audio":  # as text
            continue
        own = model.own_positions(span.item)
        has_sound, start = IS_SOUND in span.item.tensors, span.offset
        out[:, done:start] = torch.arange(position, position + start - done)
        position += start - done
        if has_sound and model.joins_marks:  # the marks of the video and of its sound
            position -= 1
            out[:, start - 1] -= 1
        out[:, start : span.end] = own + position
        position += model.length_of(own, span.item)
        done = span.end
        if has_sound and model.joins_marks:
            out[:, done : done + 2] = position
            position, done = position + 1, min(done + 2, num_tokens)
    out[:, done:] = torch.arange(position, position + num_tokens - done)
    return out


def _times(own: Tensor, is_sound: Tensor, count: int) -> Tensor:
    """Returns the positions of a video's tokens and of its sound's, in the order of the prompt."""
    found = torch.empty(3, len(is_sound), dtype=torch.int64)
    found[:, ~is_sound] = own
    found[:, is_sound] = torch.arange(count)
    return found


class Omni(GridLM):
    """Joins what both models share. joins_marks: the two marks of a video with its sound have one
    position."""

    joins_marks = False
    audio: TransformersTower
    position_rate: float  # positions of a second

    def own_positions(self, item: MediaInput) -> Tensor:
        """Returns the positions [3, tokens] of an item that begins at 0. Raises MediaError for
        frames between two positions."""
        frames, height, width = media_grid(item)
        rows, columns = height // self.merge_size, width // self.merge_size
        seconds = item.tensors.get(SECONDS)
        interval = 0.0 if item.kind == "image" else 1.0 if seconds is None else float(seconds)
        times = self.whole(torch.arange(frames) * interval * self.position_rate)
        axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
        own = torch.stack(axes).view(3, -1)
        is_sound = item.tensors.get(IS_SOUND)
        return own if is_sound is None else _times(own, is_sound, int(is_sound.sum()))

    def whole(self, times: Tensor) -> Tensor:
        """Returns times as positions."""
        return times.long()

    def length_of(self, own: Tensor, item: MediaInput) -> int:
        """Returns how far an item advances the position: to the highest of its last piece."""
        is_sound = item.tensors.get(IS_SOUND)
        if is_sound is None:
            return int(own.max()) + 1
        changes = (is_sound[1:] != is_sound[:-1]).nonzero()
        last = int(changes[-1]) + 1 if len(changes) else 0
        return int(own[:, last:].max()) + 1

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor:
        """See GridLM."""
        return _positions(self, num_tokens, media)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """Returns [num_tokens, media size] for each item; images and videos go through their tower
        together, each sound by itself."""
        seen = [item for item in items if item.kind != "audio"]
        device = self.model.embed_tokens.weight.device
        found: dict[int, Tensor] = {}
        if seen:
            pixels = torch.cat([to_device(item.tensors["pixels"], device) for item in seen])
            rows = self.encode(pixels, [media_grid(item) for item in seen])
            counts = [item.num_tokens - _num_sound(item) for item in seen]
            found = {
                id(item): own for item, own in zip(seen, torch.split(rows, counts), strict=True)
            }
        return [self._joined(item, found.get(id(item)), device) for item in items]

    def _joined(self, item: MediaInput, seen: Tensor | None, device: torch.device) -> Tensor:
        """Returns the embeddings of an item of which the frames, if any, are encoded."""
        if seen is not None and IS_SOUND not in item.tensors:
            return seen
        heard = self._heard(item, device)
        if seen is None:
            return heard
        is_sound = item.tensors[IS_SOUND].to(device)
        rows = seen.new_empty(item.num_tokens, seen.shape[1])
        rows[~is_sound], rows[is_sound] = seen, heard.to(seen.dtype)
        return rows

    def _heard(self, item: MediaInput, device: torch.device) -> Tensor:
        """Returns the embeddings of a sound, with zeros for the layers that get features of images
        only."""
        mask = item.tensors["feature_attention_mask"].to(device)
        features = item.tensors["input_features"].to(device, self.audio.dtype)
        packed = features.permute(0, 2, 1)[mask.bool()].permute(1, 0)
        out = self.audio.inner(packed, feature_lens=mask.sum(-1), return_dict=True)
        rows: Tensor = out.last_hidden_state
        missing = getattr(self, "media_size", self.hidden_size) - rows.shape[1]
        return nn.functional.pad(rows, (0, missing))


def _num_sound(item: MediaInput) -> int:
    """Returns how many tokens of a video are its sound's."""
    return int(item.tensors[IS_SOUND].sum()) if IS_SOUND in item.tensors else 0


class Qwen25OmniForConditionalGeneration(Omni, Qwen25VLForConditionalGeneration):
    """The thinker of transformers' Qwen2_5OmniForConditionalGeneration."""

    joins_marks = True

    def __init__(self, config: Any) -> None:
        thinker = copy.deepcopy(thinker_of(config))
        thinker.vision_config.tokens_per_second = thinker.position_id_per_seconds
        super().__init__(thinker)
        self.position_rate = float(thinker.position_id_per_seconds)
        self.audio = TransformersTower(thinker.audio_config, Qwen2_5OmniAudioEncoder)
        renames = (
            *RENAMES,
            *VL_RENAMES,
            (r"^(visual\.blocks\.\d+\.attn)\.([qkv])\.", r"\1.\2_proj."),
        )
        is_tied = self.lm_head is None
        ignored = (*IGNORED, *UNUSED, *(("lm_head",) if is_tied else ()))
        self.weight_map = WeightMap(self, renames=renames, ignored=ignored)


class Qwen3OmniForConditionalGeneration(Omni, Qwen3VLMoeForConditionalGeneration):
    """The thinker of transformers' Qwen3OmniMoeForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        thinker = thinker_of(config)
        super().__init__(thinker)
        self.position_rate = float(thinker.position_id_per_seconds)
        self.audio = TransformersTower(thinker.audio_config, Qwen3OmniMoeAudioEncoder)
        renames = (
            *RENAMES,
            *VL3_RENAMES,
            (r"^visual\.merger_list\.", "visual.deepstack_merger_list."),
            (r"^(visual\.(?:merger|deepstack_merger_list\.\d+))\.ln_q\.", r"\1.norm."),
            (r"^(visual\.(?:merger|deepstack_merger_list\.\d+)\.mlp)\.0\.", r"\1.fc1."),
            (r"^(visual\.(?:merger|deepstack_merger_list\.\d+)\.mlp)\.2\.", r"\1.fc2."),
        )
        self.weight_map = WeightMap(self, renames=renames, ignored=(*IGNORED, *UNUSED))

    def whole(self, times: Tensor) -> Tensor:
        """See Omni: this model's positions are not rounded, and here they are whole numbers."""
        if not torch.equal(times, times.round()):
            raise MediaError(
                f"the frames of the video fall between the {self.position_rate:g} positions of a "
                f"second; choose an fps for which 2 / fps * {self.position_rate:g} is whole"
            )
        return times.long()
