"""Writes checkpoints of real architectures with random bf16 weights.

    python examples/benchmarks/checkpoints.py FOLDER [ernie03] [qwen05] [qwen25vl] [qwen35] [gemma3]
        [gemma4] [qwen3moe]

ernie03     ERNIE-4.5-0.3B, 361 M parameters
qwen05      Qwen2-0.5B, 494 M parameters
qwen25vl    Qwen2.5-VL with a decoder of 0.5 B and a vision tower of 16 layers, 621 M parameters
qwen35      Qwen3.5-0.8B: 18 layers of Gated DeltaNet, 6 of attention, and its vision tower
gemma3      the first 6 of the 34 layers of Gemma-3-4B and its vision tower
gemma4      the first 15 of the 35 layers of Gemma-4-E2B (the last 10 share keys and values) and its
            vision tower
qwen3moe    the first 4 of the 48 layers of Qwen3-30B-A3B, with 32,000 tokens; only when it is named

The amount of work does not depend on the values of the weights when end-of-sequence is ignored.
qwen25vl-v4 has the weights of qwen25vl and a config.json for transformers 4, for exports.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NAMES = ("ernie03", "qwen05", "qwen25vl", "qwen35", "gemma3", "gemma4")
MEDIA_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
GEMMA3_MEDIA_TOKENS = {
    "boi_token_index": "<start_of_image>",
    "image_token_index": "<image_soft_token>",
    "eoi_token_index": "<end_of_image>",
}
GEMMA4_MEDIA_TOKENS = {
    "boi_token_id": "<|image>",
    "image_token_id": "<|image|>",
    "eoi_token_id": "<image|>",
    "video_token_id": "<|video|>",
}
SPECIAL = ["<|endoftext|>", "<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Where the template of a model says that a picture is, if not as Qwen's do.
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
PICTURES = {"gemma3": "<start_of_image>"}

QWEN = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
QWEN3_MOE = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
QWEN35 = {
    "vocab_size": 248320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "tie_word_embeddings": True,
}
QWEN35_VISION = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "out_hidden_size": 1024,
    "patch_size": 16,
}
GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
}
GEMMA3_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
GEMMA4 = {
    "vocab_size": 262144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 15,
    "num_kv_shared_layers": 10,
    "use_double_wide_mlp": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "layer_types": ([*["sliding_attention"] * 4, "full_attention"] * 3),
    "per_layer_config": {layer: {"head_dim": 512} for layer in (4, 9, 14)},
    "final_logit_softcapping": 30.0,
}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
VISION = {
    "depth": 16,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_heads": 12,
    "out_hidden_size": 896,
    "fullatt_block_indexes": [3, 7, 11, 15],
    "window_size": 112,
    "patch_size": 14,
}
IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 1024 * 28 * 28,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN35_IMAGES = IMAGES | {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "min_pixels": 256 * 256,
    "max_pixels": 1024 * 32 * 32,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
GEMMA3_IMAGES = {
    "image_processor_type": "Gemma3ImageProcessor",
    "processor_class": "Gemma3Processor",
    "size": {"height": 896, "width": 896},
    "image_seq_length": 256,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
}
GEMMA4_IMAGES = {
    "image_processor_type": "Gemma4ImageProcessor",
    "processor_class": "Gemma4Processor",
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "max_soft_tokens": 280,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE on Python's standard library, which every machine has."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:150]
    media = [MEDIA_TOKENS, GEMMA4_MEDIA_TOKENS, GEMMA3_MEDIA_TOKENS]
    special = [*SPECIAL, *(token for kinds in media for token in kinds.values())]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16000, special_tokens=special, show_progress=False, initial_alphabet=alphabet
    )
    bpe.train(files, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        bos_token="<s>",
        chat_template=CHAT_TEMPLATE,
    )


def build(name: str, words: PreTrainedTokenizerFast) -> torch.nn.Module:
    """Builds the model of that name with random weights in torch's default dtype."""
    ids = {f"{kind}_token_id": getattr(words, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    if name == "ernie03":
        return Ernie4_5ForCausalLM(Ernie4_5Config(**ids))  # the defaults are ERNIE-4.5-0.3B
    if name == "qwen05":
        return Qwen2ForCausalLM(Qwen2Config(**QWEN, **ids))
    if name == "qwen3moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE, **ids))
    if name == "gemma3":
        media = {key: words.convert_tokens_to_ids(it) for key, it in GEMMA3_MEDIA_TOKENS.items()}
        config = Gemma3Config(text_config=GEMMA3 | ids, vision_config=GEMMA3_VISION, **media)
        return Gemma3ForConditionalGeneration(config)
    if name == "gemma4":
        media = {key: words.convert_tokens_to_ids(it) for key, it in GEMMA4_MEDIA_TOKENS.items()}
        vision = {"pooling_kernel_size": 3}  # the other defaults are those of the model
        config = Gemma4Config(text_config=GEMMA4 | ids, vision_config=vision, **media)
        return Gemma4ForConditionalGeneration(config)
    media = {key: words.convert_tokens_to_ids(token) for key, token in MEDIA_TOKENS.items()}
    if name == "qwen35":
        config = Qwen3_5Config(
            text_config=QWEN35 | ids,
            vision_config=QWEN35_VISION,
            tie_word_embeddings=True,
            **media,
        )
        return Qwen3_5ForConditionalGeneration(config)
    config = Qwen2_5_VLConfig(
        text_config=QWEN | ids | {"rope_parameters": MROPE},
        vision_config=VISION,
        tie_word_embeddings=True,
        **media,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def write_processors(name: str, folder: Path) -> None:
    """Writes the configuration of the image and video processors of a model that has any."""
    kinds = {
        "qwen25vl": (IMAGES, "Qwen2VLVideoProcessor"),
        "qwen35": (QWEN35_IMAGES, "Qwen3VLVideoProcessor"),
        "gemma3": (GEMMA3_IMAGES, None),
        "gemma4": (GEMMA4_IMAGES, "Gemma4VideoProcessor"),
    }
    images, videos = kinds.get(name, (None, None))
    if images:
        (folder / "preprocessor_config.json").write_text(json.dumps(images))
    if videos:
        video = images | {"video_processor_type": videos}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def write_for_version_4(folder: Path) -> None:
    """Copies the folder, with a config in the format of transformers 4: the decoder's fields at the
    top level, `rope_scaling` and `torch_dtype`."""
    copy = folder.with_name(f"{folder.name}-v4")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config: dict[str, Any] = json.loads((copy / "config.json").read_text())
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {
        "type": "mrope",
        "rope_type": "default",
        "mrope_section": rope["mrope_section"],
    }
    config |= {key: value for key, value in text.items() if key not in (*config, "dtype")}
    config["torch_dtype"] = text["torch_dtype"] = "bfloat16"
    config["vision_config"]["model_type"] = "qwen2_5_vl"
    (copy / "config.json").write_text(json.dumps(config, indent=1))


def main(folder: str, names: list[str]) -> None:
    """Writes the named models, by default all, to subfolders of `folder`."""
    words = tokenizer()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    for name in names or NAMES:
        path = Path(folder) / name
        model = build(name, words)
        model.save_pretrained(path)
        words.chat_template = CHAT_TEMPLATE.replace(PICTURE, PICTURES.get(name, PICTURE))
        words.save_pretrained(path)
        write_processors(name, path)
        if name == "qwen25vl":
            write_for_version_4(path)
        num_params = sum(parameter.numel() for parameter in model.parameters())
        print(f"{path}: {num_params / 1e6:.0f} M parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*", metavar="name", help="default: all but qwen3moe")
    options = parser.parse_args()
    if unknown := set(options.names) - {*NAMES, "qwen3moe"}:
        parser.error(f"no model is named {', '.join(sorted(unknown))}")
    main(options.folder, options.names)
