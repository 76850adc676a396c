"""Writes model folders without weights for gpu.py: config, tokenizer and processor files.

LLM(load_format="dummy") makes random weights on the device. The amount of work does not depend on
their values, since end-of-sequence is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmdeploy_llm_plugins.ernie.tiny import TOKENS as ERNIE_TOKENS
from mmdeploy_llm_plugins.qwen.tiny import TOKENS as QWEN_TOKENS
from transformers import Ernie4_5_VLMoeConfig, PretrainedConfig, Qwen2_5_VLConfig

from mmdeploy_llm.testing.tiny import families, family_of, make_tokenizer, token_ids

MAX_PIXELS = 1280 * 28 * 28

# Qwen2.5-VL-7B: 7.6 B parameters in the decoder, 0.7 B in the vision tower.
QWEN_TEXT: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [16, 24, 24],
    },
}
QWEN_VISION: Mapping[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
    "patch_size": 14,
}
QWEN_TINY_TEXT = {
    **QWEN_TEXT,
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
}
QWEN_TINY_VISION = {
    **QWEN_VISION,
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
# ERNIE-4.5-VL-28B-A3B: transformers' defaults except for the M-RoPE sections.
ERNIE_ROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]}
ERNIE_TINY: Mapping[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "moe_intermediate_size": [32, 16],
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "rope_parameters": {**ERNIE_ROPE, "mrope_section": [5, 5, 6]},
}
ERNIE_TINY_VISION = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}


def write_qwen(folder: Path, *, is_tiny: bool) -> Path:
    """Writes the folder of Qwen2.5-VL-7B, or of a tiny model of the family."""
    tokenizer = make_tokenizer("qwen2_vl")
    config = Qwen2_5_VLConfig(
        text_config={**(QWEN_TINY_TEXT if is_tiny else QWEN_TEXT), **_ids(tokenizer)},
        vision_config=dict(QWEN_TINY_VISION if is_tiny else QWEN_VISION),
        tie_word_embeddings=False,
        **token_ids(tokenizer, QWEN_TOKENS),
    )
    return _write(folder, config, "Qwen2_5_VLForConditionalGeneration", "qwen2_vl")


def write_ernie(folder: Path, *, is_tiny: bool) -> Path:
    """Writes the folder of ERNIE-4.5-VL-28B-A3B, or of a tiny model of the family."""
    tokenizer = make_tokenizer("ernie4_5_vl_moe")
    text = dict(ERNIE_TINY) if is_tiny else {"rope_parameters": ERNIE_ROPE}
    config = Ernie4_5_VLMoeConfig(
        text_config={**text, **_ids(tokenizer)},
        vision_config=dict(ERNIE_TINY_VISION) if is_tiny else {},
        tie_word_embeddings=True,
        **token_ids(tokenizer, ERNIE_TOKENS),
    )
    return _write(folder, config, "Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe")


def _ids(tokenizer: Any) -> dict[str, int]:
    return {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in IDS}


IDS = ("bos", "eos", "pad")


def _write(folder: Path, config: PretrainedConfig, architecture: str, family: str) -> Path:
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    make_tokenizer(family).save_pretrained(folder)
    for name, contents in family_of(families()[family]).files.items():
        sizes = {"shortest_edge": 56 * 56, "longest_edge": MAX_PIXELS}
        (folder / name).write_text(json.dumps({**contents, "size": sizes}), "utf-8")
    return folder
