"""The architecture of shapes-vl: ERNIE 4.5 VL MoE, scaled down until it fits into 8 MB of bf16.

vision tower   4 layers, 128 wide, patches of 14 px           0.86 M parameters
resampler      2 x 2 patches -> one token of the text model   1.41 M
text model     4 layers, 192 wide, 6 heads (2 for keys and values); the first is dense, the
               others have 4 text and 4 vision experts (2 of them active) and a shared one
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pixels import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH, VIDEO
from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeImageProcessorPil,
)

MAX_FILE_BYTES = 8_000_000
MAX_POSITIONS = 32768


def make_config(tokenizer: PreTrainedTokenizerFast) -> Ernie4_5_VLMoeConfig:
    """Build the config with the token ids of the tokenizer."""
    special = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    text = {
        # Rounded up: matrix kernels are faster for multiples of 32.
        "vocab_size": -(-len(tokenizer) // 32) * 32,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        # Smaller than ERNIE's theta: prompts have a few hundred tokens.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [5, 5, 6],
        },
        "moe_intermediate_size": [64, 48],
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "tie_word_embeddings": True,
        **special,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 512,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_merge_size": 2,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
    ids = {
        f"{kind}{part}_token_id": getattr(tokenizer, f"{kind}{part}_token_id")
        for kind in ("image", "video")
        for part in ("", "_start", "_end")
    }
    return Ernie4_5_VLMoeConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True, **ids, **special
    )


def make_model(config: Ernie4_5_VLMoeConfig) -> Ernie4_5_VLMoeForConditionalGeneration:
    """Build the model with new float32 weights, drawn from torch's global generator."""
    model = Ernie4_5_VLMoeForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    return model.float()


def save_folder(
    weights: dict[str, torch.Tensor],
    config: Ernie4_5_VLMoeConfig,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> int:
    """Write a complete model folder with bf16 weights; return the bytes of the weight file."""
    config.dtype = torch.bfloat16
    model = Ernie4_5_VLMoeForConditionalGeneration(config)
    model.load_state_dict(weights)
    # Not by transformers' own .to(), which would keep the routers in float32.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=128,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    Ernie4_5_VLMoeImageProcessorPil(size=size).save_pretrained(folder)
    # Written by hand because transformers' class for videos needs torchvision.
    video = {
        "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
        "size": size,
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        **{name: getattr(VIDEO, name) for name in ("fps", "min_frames", "max_frames")},
        "draw_on_frames": VIDEO.draw_on_frames,
        "font": VIDEO.font,
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n")
    written = (folder / "model.safetensors").stat().st_size
    if written >= MAX_FILE_BYTES:
        raise ValueError(f"model.safetensors has {written} bytes, allowed are {MAX_FILE_BYTES - 1}")
    return written
