"""Qwen3-VL, dense and with experts: the Qwen3 decoder with interleaved M-RoPE, a tower whose inner
layers feed the first layers of the decoder, and videos with text between their frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import (
    DecoderConfig,
    Grid,
    GridLM,
    MoEConfig,
    rotary_config,
    sparse_layers,
    standard_decoder,
)
from mmdeploy_llm.weights.map import Target, WeightMap

from .text import EXPERT_KEYS, IGNORED
from .tower3 import DeepstackTower

# From the published names, which are also those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    (r"^(visual\.blocks\.\d+\.mlp)\.linear_fc", r"\1.fc"),
    (r"^(visual\.(?:merger|deepstack_merger_list\.\d+))\.linear_fc", r"\1.mlp.fc"),
)
SECTIONS = (24, 20, 20)  # transformers' default: channel pairs of time, height and width


class Qwen3VLForConditionalGeneration(GridLM):
    """transformers' Qwen3VLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        decoder = self.decoder_config(config)
        super().__init__(decoder, merge_size=config.vision_config.spatial_merge_size)
        self.visual = DeepstackTower(config.vision_config)
        self.media_size = decoder.hidden_size * (1 + len(self.visual.taps))
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    @staticmethod
    def decoder_config(config: Any) -> DecoderConfig:
        """Builds the decoder config of the text config."""
        text = config.text_config
        sections = text.rope_parameters.get("mrope_section", SECTIONS)
        rotary = rotary_config(text)
        axes = interleaved_axes(sections, rotary.head_dim // 2)
        return replace(
            standard_decoder(text, replace(rotary, axes=axes), own=EXPERT_KEYS),
            qkv_bias=text.attention_bias,
            out_bias=text.attention_bias,
            qk_norm=True,
            is_tied=config.tie_word_embeddings,
        )

    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See GridLM."""
        out: Tensor = self.visual(pixels, grids)
        return out

    def grids_of(self, span: MediaSpan) -> Sequence[tuple[int, Grid, float]]:
        """See GridLM. Each frame of a video is its own grid, because text separates the frames; in
        a prompt of token ids without such text the video is one grid."""
        ((_, (frames, height, width), interval),) = super().grids_of(span)
        num = frames // len(span.runs)
        return [(start, (num, height, width), interval) for start, _ in span.runs]


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """transformers' Qwen3VLMoeForConditionalGeneration."""

    @staticmethod
    def decoder_config(config: Any) -> DecoderConfig:
        """Builds the decoder config of the text config, with its experts."""
        text = config.text_config
        decoder = Qwen3VLForConditionalGeneration.decoder_config(config)
        moe = MoEConfig(
            num_experts=text.num_experts,
            top_k=text.num_experts_per_tok,
            intermediate_size=text.moe_intermediate_size,
            router="softmax",
            is_normed=getattr(text, "norm_topk_prob", True),  # only Omni's config has it
        )
        return replace(decoder, moe=moe, moe_layers=sparse_layers(text))

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map. Published stacks of experts have their last two axes swapped, those
        saved by transformers do not; the shape decides."""
        targets = super().weight_targets(key)
        if targets and key.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return [replace(target, transpose=None) for target in targets]
        return targets


def interleaved_axes(sections: Sequence[int], num_pairs: int) -> tuple[int, ...]:
    """Returns the axis of each channel pair in Qwen3's M-RoPE: time, height and width alternate
    until height and width have as many pairs as `sections` says; the other pairs are time's."""
    axes = (pair % 3 for pair in range(num_pairs))
    return tuple(axis if pair // 3 < sections[axis] else 0 for pair, axis in enumerate(axes))
