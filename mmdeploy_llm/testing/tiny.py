"""Tiny random checkpoints of the five in-tree families: real config, safetensors, tokenizer, chat
template and preprocessor files, written through transformers, for tests against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

ERNIE_TOKENS = {
    "image_start_token_id": "<|IMAGE_START|>",
    "image_token_id": "<|IMAGE_PLACEHOLDER|>",
    "image_end_token_id": "<|IMAGE_END|>",
    "video_start_token_id": "<|VIDEO_START|>",
    "video_token_id": "<|VIDEO_PLACEHOLDER|>",
    "video_end_token_id": "<|VIDEO_END|>",
}
QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    "<|begin_of_sentence|>",
    "<|end_of_sentence|>",
    "<|im_start|>",
    "<|im_end|>",
    *ERNIE_TOKENS.values(),
    "<|image@placeholder|>",
    "<|video@placeholder|>",
    *QWEN_TOKENS.values(),
)
TEXT_TOKENS = ("<think>", "</think>", "<response>", "</response>")  # one token each, not special
VOCAB_SIZE = 384

CORPUS = (
    "The quick brown fox jumps over the lazy dog. User: Describe the picture. Assistant: A red "
    "circle and a blue square on a white background; how many are there? There are two of them.\n"
)
IMAGE_MEAN = [0.48145466, 0.4578275, 0.40821073]
IMAGE_STD = [0.26862954, 0.26130258, 0.27577711]
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 64

ERNIE_TEMPLATE = (
    "{{- '<|begin_of_sentence|>' -}}{%- set n = namespace(image=0, video=0) -%}"
    "{%- for m in messages -%}"
    "{{- {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m.role] -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type in ['image', 'image_url'] -%}{%- set n.image = n.image + 1 -%}"
    "{{- 'Picture ' ~ n.image ~ ':<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>' -}}"
    "{%- elif p.type in ['video', 'video_url'] -%}{%- set n.video = n.video + 1 -%}"
    "{{- 'Video ' ~ n.video ~ ':<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>' -}}"
    "{%- else -%}{{- p.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|end_of_sentence|>' if m.role == 'assistant' else '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant: <think>' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '</think>' -}}{%- endif -%}"
    "{%- endif -%}"
)
QWEN_TEMPLATE = (
    "{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type in ['image', 'image_url'] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif p.type in ['video', 'video_url'] -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}{{- p.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def write_tiny(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **text_options: Any,
) -> Path:
    """Writes a tiny checkpoint of `family` (a name in FAMILIES) and returns its folder.

    The same seed gives the same weights. text_options replace fields of the text model's config.
    Every parameter is random, norm weights and biases too, so that a misplaced one shows. Raises
    KeyError for an unknown family.
    """
    tokenizer = make_tokenizer(family)
    config = FAMILIES[family](tokenizer, text_options)
    architecture = ARCHITECTURES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, architecture)(config)
        randomize(model)
    model = model.to(dtype)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    _write_preprocessor(family, folder)
    return folder


def randomize(model: nn.Module) -> None:
    """Fills all parameters with values that keep activations near 1, from torch's global seed."""
    for name, parameter in model.named_parameters():
        values = torch.randn_like(parameter)
        if "norm" in name or ".ln" in name:
            shift = 1.0 if name.endswith("weight") else 0.0
            parameter.data = values * 0.1 + shift
        elif parameter.ndim == 1 or "correction_bias" in name:
            parameter.data = values * 0.05
        elif "embed_tokens" in name:
            parameter.data = values * 0.3
        else:
            fan_in = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            parameter.data = values / fan_in**0.5


def make_tokenizer(family: str = "qwen2") -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens of both ERNIE and Qwen, and the family's chat
    template: every text can be encoded and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *TEXT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] not in TEXT_TOKENS
    is_ernie = family.startswith("ernie")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        bos_token="<s>",
        eos_token="</s>" if is_ernie else "<|im_end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=ERNIE_TEMPLATE if is_ernie else QWEN_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def _text_config(
    tokenizer: transformers.PreTrainedTokenizerFast, options: Mapping[str, Any], **fields: Any
) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **fields,
        **options,
    }


def _token_ids(
    tokenizer: transformers.PreTrainedTokenizerFast, names: Mapping[str, str]
) -> dict[str, int]:
    return {field: tokenizer.convert_tokens_to_ids(text) for field, text in names.items()}


def _ernie(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text_config(
        tokenizer, options, num_attention_heads=6, head_dim=16, tie_word_embeddings=True
    )
    return transformers.Ernie4_5Config(**fields)


def _ernie_moe(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text_config(
        tokenizer,
        options,
        tie_word_embeddings=True,
        moe_intermediate_size=32,
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=2,
    )
    return transformers.Ernie4_5_MoeConfig(**fields)


def _ernie_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [5, 5, 6]}
    text = _text_config(
        tokenizer,
        options,
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters=rope,
        moe_intermediate_size=[32, 16],
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        tie_word_embeddings=True,
    )
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    return transformers.Ernie4_5_VLMoeConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        **_token_ids(tokenizer, ERNIE_TOKENS),
    )


def _qwen(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text_config(
        tokenizer, options, hidden_size=60, num_attention_heads=6, tie_word_embeddings=False
    )
    return transformers.Qwen2Config(**fields)


def _qwen_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = _text_config(tokenizer, options, rope_parameters=rope, tie_word_embeddings=True)
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
        "window_size": 112,
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        **_token_ids(tokenizer, QWEN_TOKENS),
    )


def _write_preprocessor(family: str, folder: Path) -> None:
    """preprocessor_config.json (and its video counterpart) of the two families with media."""
    shared = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_STD,
        "merge_size": 2,
        "patch_size": 14,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    }
    kinds = {
        "ernie4_5_vl_moe": ("Ernie4_5_VLMoe", {"temporal_patch_size": 1}),
        "qwen2_5_vl": ("Qwen2VL", {"temporal_patch_size": 2}),
    }
    if family not in kinds:
        return
    prefix, own = kinds[family]
    image = {**shared, **own, "image_processor_type": f"{prefix}ImageProcessor"}
    video = {
        **shared,
        "temporal_patch_size": 2,
        "video_processor_type": f"{prefix}VideoProcessor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2), "utf-8")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2), "utf-8")


FAMILIES: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "ernie4_5": _ernie,
    "ernie4_5_moe": _ernie_moe,
    "ernie4_5_vl_moe": _ernie_vl,
    "qwen2": _qwen,
    "qwen2_5_vl": _qwen_vl,
}
ARCHITECTURES: Mapping[str, str] = {
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeForConditionalGeneration",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
}
