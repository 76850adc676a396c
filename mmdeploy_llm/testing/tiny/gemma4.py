"""Tiny checkpoints of Gemma 4: the text model, and the model with images and videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from .common import Family, text_config
from .gemma import TEMPLATE as TEXT_TEMPLATE

IMAGE, START, END, VIDEO = "<|image|>", "<|image>", "<image|>", "<|video|>"
MODEL_TURN = "{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}"
TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<|turn>' ~ m.role ~ '\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}{{- '\\n\\n" + IMAGE + "\\n\\n' -}}"
    "{%- elif part.type == 'video' -%}{{- '\\n\\n" + VIDEO + "\\n\\n' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<turn|>\\n' -}}{%- endfor -%}" + MODEL_TURN
)
KINDS = ["sliding_attention", "full_attention"]


def _text(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the text config of a small model: the last two of five layers read the keys and
    values of the two before them."""
    return text_config(
        tokenizer,
        options,
        num_hidden_layers=5,
        layer_types=[KINDS[0], *KINDS, *KINDS],
        num_kv_shared_layers=2,
        num_key_value_heads=1,
        head_dim=16,
        global_head_dim=32,
        sliding_window=7,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=384,
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    )


def _gemma4_text(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text(tokenizer, {})
    return transformers.Gemma4TextConfig(**{**fields, **options})


def _gemma4(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "position_embedding_size": 256,
        "use_clipped_linears": True,
        "standardize": True,
    }
    text = {**_text(tokenizer, {}), **options}
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        boi_token_id=tokenizer.convert_tokens_to_ids(START),
        eoi_token_id=tokenizer.convert_tokens_to_ids(END),
        tie_word_embeddings=text["tie_word_embeddings"],
    )


FAMILIES: Mapping[str, Family] = {
    "gemma4_text": Family(
        architecture="Gemma4ForCausalLM",
        make_config=_gemma4_text,
        chat_template=TEXT_TEMPLATE,
        eos_token="</s>",
    ),
    "gemma4": Family(
        architecture="Gemma4ForConditionalGeneration",
        make_config=_gemma4,
        chat_template=TEMPLATE,
        eos_token="</s>",
        special_tokens=(IMAGE, START, END, VIDEO),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 4,
                "pooling_kernel_size": 3,
                "max_soft_tokens": 70,
            },
            "video_preprocessor_config.json": {
                "video_processor_type": "Gemma4VideoProcessor",
                "patch_size": 4,
                "pooling_kernel_size": 3,
                "max_soft_tokens": 70,
                "num_frames": 3,
            },
        },
    ),
}
