"""A tiny checkpoint of Gemma 3 with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from .common import Family
from .gemma import FAMILIES as TEXT_FAMILIES

TOKEN, START, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
SIDE = 56  # pixels of an image: 4 x 4 patches, 4 tokens
TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<start_of_turn>' ~ m.role ~ '\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}{{- '" + START + "' -}}{%- else -%}{{- part.text -}}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)


def _gemma3(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = TEXT_FAMILIES["gemma3_text"].make_config(tokenizer, options)
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**vision),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids(TOKEN),
        boi_token_index=tokenizer.convert_tokens_to_ids(START),
        eoi_token_index=tokenizer.convert_tokens_to_ids(END),
        tie_word_embeddings=text.tie_word_embeddings,
    )


FAMILIES: Mapping[str, Family] = {
    "gemma3": Family(
        architecture="Gemma3ForConditionalGeneration",
        make_config=_gemma3,
        chat_template=TEMPLATE,
        eos_token="</s>",
        special_tokens=(TOKEN, START, END),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": SIDE, "width": SIDE},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 2,
            }
        },
    ),
}
