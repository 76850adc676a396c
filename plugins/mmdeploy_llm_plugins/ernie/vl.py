"""ERNIE 4.5 VL: the decoder with experts by modality and M-RoPE, a vision tower, a resampler."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import DecoderConfig, Grid, GridLM, MoEConfig, alternating_axes
from mmdeploy_llm.weights.map import Target, WeightMap

from .text import IGNORED, decoder_config
from .tower import Resampler, VisionTower

VISION_TOKENS = (
    "image_start_token_id",
    "image_token_id",
    "image_end_token_id",
    "video_start_token_id",
    "video_token_id",
    "video_end_token_id",
)


class ErnieVLForConditionalGeneration(GridLM):
    """transformers' Ernie4_5_VLMoeForConditionalGeneration."""

    vision_ids: Tensor

    def __init__(self, config: Any) -> None:
        vision = config.vision_config
        super().__init__(_decoder_config(config), merge_size=vision.spatial_merge_size)
        self.temporal_merge_size = vision.temporal_merge_size
        self.num_experts = config.text_config.moe_num_experts
        self.vision_tower = VisionTower(vision)
        self.resampler_model = Resampler(config)
        self._vision_ids = tuple(getattr(config, name) for name in VISION_TOKENS)
        self.register_buffer("vision_ids", torch.empty(0, dtype=torch.int64), persistent=False)
        is_tied = config.tie_word_embeddings
        self.weight_map = WeightMap(
            self,
            renames=_renames(self.num_experts),
            ignored=(*IGNORED, "^lm_head") if is_tied else IGNORED,
        )

    def init_buffers(self, device: torch.device) -> None:
        """See weights.load."""
        self.vision_ids = torch.tensor(self._vision_ids, device="cpu").to(device)

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Returns hidden states [T, hidden]. Placeholder, start and end tokens of the prompt's
        media go to the vision experts; the same ids, when generated, to the text experts."""
        is_vision = None
        if inputs.has_prompt:
            is_vision = torch.isin(inputs.token_ids, self.vision_ids) & inputs.in_prompt
        out: Tensor = self.model(inputs, is_vision)
        return out

    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See GridLM."""
        out: Tensor = self.resampler_model(self.vision_tower(pixels, grids), grids)
        return out

    def grids_of(self, span: MediaSpan) -> Sequence[tuple[int, Grid, float]]:
        """See GridLM. The resampler merges two frames of a video into one."""
        ((offset, (frames, height, width), interval),) = super().grids_of(span)
        if span.item.kind == "video":
            frames //= self.temporal_merge_size
        return ((offset, (frames, height, width), interval),)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map. The published layout holds the routers of both modalities: as two
        transposed weights, and as biases stacked in one tensor."""
        match = re.fullmatch(r"(model\.(?:language_model\.)?layers\.\d+\.mlp)\.(.+)", key)
        if match is not None:
            mlp = match[1].replace("language_model.", "")
            text, vision = f"{mlp}.text_moe.gate", f"{mlp}.vision_moe.gate"
            if match[2] == "gate.weight":
                return (Target(name=f"{text}.weight", transpose=True),)
            if match[2] == "gate.weight_1":
                return (Target(name=f"{vision}.weight", transpose=True),)
            if match[2] == "moe_statics.e_score_correction_bias":
                return (
                    Target(name=f"{text}.correction_bias", source=slice(0, 1)),
                    Target(name=f"{vision}.correction_bias", source=slice(1, 2)),
                )
        return super().weight_targets(key)


def _decoder_config(config: Any) -> DecoderConfig:
    text = config.text_config
    decoder = decoder_config(text)
    sections = text.rope_parameters.get("mrope_section", (22, 22, 20))
    moe = MoEConfig(
        num_experts=text.moe_num_experts,
        top_k=text.moe_k,
        intermediate_size=text.moe_intermediate_size[0],
        vision_intermediate_size=text.moe_intermediate_size[1],
        norm_min=text.moe_norm_min,
        shared_size=text.moe_intermediate_size[0] * text.moe_num_shared_experts,
        shared_bias=decoder.mlp_bias,
    )
    layers = enumerate(text.mlp_layer_types)
    return replace(
        decoder,
        rotary=replace(decoder.rotary, axes=alternating_axes(sections)),
        is_tied=config.tie_word_embeddings,
        moe=moe,
        moe_layers=frozenset(layer for layer, kind in layers if kind == "sparse"),
    )


def _renames(num_experts: int) -> tuple[tuple[str, Any], ...]:
    """Returns the renames from the published names, and from transformers' modules, to ours."""

    def split_experts(match: re.Match[str]) -> str:
        """Renames an expert; published indices count text experts first, then vision experts."""
        index = int(match[1])
        kind = "text_moe" if index < num_experts else "vision_moe"
        return f".mlp.{kind}.experts.{index % num_experts}."

    return (
        (r"^model\.language_model\.", "model."),
        (r"^(model\.)?vision_(model|tower)\.", "vision_tower."),
        (r"^(model\.)?resampler_model\.", "resampler_model."),
        (r"(spatial|temporal)_linear\.0\.", r"\1_linear.fc1."),
        (r"(spatial|temporal)_linear\.2\.", r"\1_linear.fc2."),
        (r"(spatial|temporal)_linear\.3\.", r"\1_linear.ln."),
        (r"\.mlp\.experts\.(\d+)\.", split_experts),
        (r"_moe\.gate\.moe_statics\.e_score_correction_bias$", "_moe.gate.correction_bias"),
    )
