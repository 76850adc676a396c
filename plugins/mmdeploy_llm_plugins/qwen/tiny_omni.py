"""Tiny checkpoints of the thinkers of Qwen2.5-Omni and Qwen3-Omni."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import (
    Family,
    MediaForm,
    grid_inputs,
    preprocessor_files,
    text_config,
    token_ids,
)

from .tiny import ROPE, vision_config
from .tiny_vl import EXPERTS, QWEN3_IMAGE, QWEN3_VIDEO, qwen3_text, qwen3_vision
from .video import SECONDS

CHUNK = 4  # seconds of the longest sound of Qwen2.5-Omni
NAMED2 = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
NAMED3 = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
TOWER = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "n_window": 20,
}


def _template(named: Mapping[str, str]) -> str:
    begin, end = named["vision_bos_token"], named["vision_eos_token"]
    parts = "".join(
        f"{{%- {test} p.type == '{kind}' -%}}{{{{- '{text}' -}}}}"
        for test, kind, text in (
            ("if", "image", f"{begin}{named['image_token']}{end}"),
            ("elif", "video", f"{begin}{named['video_token']}{end}"),
            (
                "elif",
                "audio",
                f"{named['audio_bos_token']}{named['audio_token']}{named['audio_eos_token']}",
            ),
        )
    )
    return (
        "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
        "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
        f"{parts}{{%- else -%}}{{{{- p.text -}}}}{{%- endif -%}}"
        "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def _ids(tokenizer: Any, named: Mapping[str, str]) -> dict[str, int]:
    names = {
        "vision_start_token_id": named["vision_bos_token"],
        "vision_end_token_id": named["vision_eos_token"],
        "audio_start_token_id": named["audio_bos_token"],
        "audio_end_token_id": named["audio_eos_token"],
    }
    return token_ids(tokenizer, names)


def _qwen2_5_omni(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = text_config(tokenizer, options, rope_parameters=dict(ROPE))
    tokens = {
        "image_token_index": NAMED2["image_token"],
        "audio_token_index": NAMED2["audio_token"],
        "video_token_index": NAMED2["video_token"],
    }
    return transformers.Qwen2_5OmniThinkerConfig(
        text_config=text,
        vision_config=vision_config(text),
        audio_config={
            **TOWER,
            "max_source_positions": 100 * CHUNK,
            "output_dim": text["hidden_size"],
        },
        **token_ids(tokenizer, tokens),
        **_ids(tokenizer, NAMED2),
    )


def _qwen3_omni(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = qwen3_text(tokenizer, options, **EXPERTS)
    tokens = {
        "image_token_id": NAMED3["image_token"],
        "audio_token_id": NAMED3["audio_token"],
        "video_token_id": NAMED3["video_token"],
    }
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text,
        vision_config=qwen3_vision(text),
        audio_config={
            **TOWER,
            "n_window": 50,  # transformers counts the tokens of a window as of 50
            "n_window_infer": 200,
            "downsample_hidden_size": 8,
            "output_dim": text["hidden_size"],
        },
        position_id_per_seconds=13,
        **token_ids(tokenizer, tokens),
        **_ids(tokenizer, NAMED3),
    )


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the arguments of the models, which find media by their tokens."""
    inputs = grid_inputs(config, ids, media)
    del inputs["mm_token_type_ids"]
    seconds = [
        span.item.tensors.get(SECONDS, torch.tensor(1.0))
        for span in media
        if span.item.kind == "video"
    ]
    if seconds:
        inputs["video_second_per_grid"] = torch.stack(seconds)
    inputs["attention_mask"] = torch.ones_like(ids)
    return inputs


def _files(
    image: Mapping[str, Any] | None, video: Mapping[str, Any] | None, processor: str
) -> dict[str, dict[str, Any]]:
    files = preprocessor_files("Qwen2VL", image=image, video=video)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": TOWER["num_mel_bins"],
        "sampling_rate": 16000,
        "hop_length": 160,
        "chunk_length": CHUNK,
        "n_fft": 400,
        "padding_value": 0.0,
    }
    named = {"processor_class": processor, "feature_extractor": extractor}
    return {**files, "processor_config.json": named}


QWEN2_5_OMNI = Family(
    architecture="Qwen2_5OmniThinkerForConditionalGeneration",
    make_config=_qwen2_5_omni,
    chat_template=_template(NAMED2),
    special_tokens=tuple(NAMED2.values()),
    named_tokens=NAMED2,
    files=_files(None, None, "Qwen2_5OmniProcessor"),
    media=MediaForm(inputs=_inputs),
)
QWEN3_OMNI_MOE = Family(
    architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
    make_config=_qwen3_omni,
    chat_template=_template(NAMED3),
    special_tokens=("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"),
    named_tokens=NAMED3,
    files=_files(QWEN3_IMAGE, QWEN3_VIDEO, "Qwen3OmniMoeProcessor"),
    media=MediaForm(inputs=_inputs),
)
