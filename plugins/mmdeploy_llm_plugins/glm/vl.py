"""GLM-4V, dense (GLM-4.1V, GLM-4.6V-Flash) and with experts (GLM-4.5V, GLM-4.6V), and GLM-OCR: a
GLM decoder with M-RoPE, a vision tower, and videos with text between their frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import (
    DecoderConfig,
    Grid,
    GridLM,
    rotary_config,
    sectioned_axes,
    standard_decoder,
)
from mmdeploy_llm.weights.map import WeightMap

from .experts import KEYS as EXPERT_KEYS
from .experts import GlmLayer, draft_keys
from .tower import GlmTower

# From the published names, which are also those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    (r"^visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"^visual\.downsample\.", "visual.downsample.proj."),
    (r"^visual\.merger\.(gate|up|down)_proj\.", r"visual.merger.mlp.\1_proj."),
)
IGNORED = (r"inv_freq$", r"\.embeddings\.position_ids$")
SECTIONS = (8, 12, 12)  # transformers' default: channel pairs of time, height and width
DENSE, SPARSE, OCR = "glm4v_text", "glm4v_moe_text", "glm_ocr_text"


class GlmVForConditionalGeneration(GridLM):
    """transformers' Glm4vForConditionalGeneration, Glm46VForConditionalGeneration,
    Glm4vMoeForConditionalGeneration and GlmOcrForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        new_layer = partial(GlmLayer, text=config.text_config)
        super().__init__(decoder, new_layer, merge_size=config.vision_config.spatial_merge_size)
        self.visual = GlmTower(config.vision_config)
        ignored = [*IGNORED, *(["^lm_head"] if decoder.is_tied else [])]
        if type(config.text_config).model_type in (SPARSE, OCR):
            ignored.append(draft_keys(decoder))
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

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


def decoder_config(config: Any) -> DecoderConfig:
    """Builds the decoder config of the text config. Dense models rotate adjacent channels and norm
    the outputs of attention and MLP; models with experts do neither. Raises ModelNotSupportedError
    for a text model of another kind."""
    text = config.text_config
    kind = type(text).model_type  # of transformers' class: published files may say otherwise
    if kind not in (DENSE, SPARSE, OCR):
        raise ModelNotSupportedError(
            f"the text model {kind!r} of this GLM checkpoint is not supported, only {DENSE}, "
            f"{SPARSE} and {OCR}; LLM(blocked_plugins=('glm',)) serves it with transformers' model"
        )
    axes = sectioned_axes(text.rope_parameters.get("mrope_section", SECTIONS))
    rotary = rotary_config(text, axes=axes, is_interleaved=kind != SPARSE)
    return replace(
        standard_decoder(text, rotary, own=EXPERT_KEYS),
        qkv_bias=kind == DENSE or (kind == SPARSE and text.attention_bias),
        out_bias=False,
        post_norms=kind != SPARSE,
        is_tied=config.tie_word_embeddings,
    )
