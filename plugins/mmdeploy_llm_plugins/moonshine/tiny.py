"""Tiny checkpoints of Moonshine and Moonshine Streaming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEXTS

from .sound import tokens_of

NUM_SAMPLES = 16_000
LAST = ("</s>", "<s>")  # after the words
END, START = VOCAB_SIZE, VOCAB_SIZE + 1


def _moonshine(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = {
        "vocab_size": VOCAB_SIZE + len(LAST),
        "hidden_size": 64,
        "intermediate_size": 96,
        "encoder_num_hidden_layers": 2,
        "decoder_num_hidden_layers": 3,
        "encoder_num_attention_heads": 4,
        "decoder_num_attention_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.9,
        },
        "bos_token_id": START,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        **options,
    }
    return transformers.MoonshineConfig(**fields)


def _streaming(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = {
        "vocab_size": VOCAB_SIZE + len(LAST),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "partial_rotary_factor": 0.75,
        },
        "encoder_config": {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "sample_rate": 8000,  # for frames of 80 samples, as of transformers' processor
            "frame_ms": 10.0,
            "sliding_windows": [[8, 2], [6, 0], [4, 3]],
        },
        "bos_token_id": START,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        **options,
    }
    return transformers.MoonshineStreamingConfig(**fields)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    return {**span.item.tensors, "decoder_input_ids": ids}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and a random sound."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (30,), generator=generator)
    count = NUM_SAMPLES + 1000 * (seed % 5)
    num_tokens = tokens_of(count)
    tensors = {"input_values": 0.1 * torch.randn(1, count, generator=generator)}
    own = getattr(config, "encoder_config", None)
    if own is not None:
        frame = round(own.sample_rate * own.frame_ms / 1000)
        tensors["input_values"] = tensors["input_values"][:, : count // frame * frame]
        tensors["attention_mask"] = torch.ones_like(tensors["input_values"], dtype=torch.int32)
        num_tokens = ((count // frame - 1) // 2) // 2 + 1
    item = MediaInput(kind="audio", tensors=tensors, num_tokens=num_tokens, key=f"moonshine-{seed}")
    return [START, *words.tolist()], [MediaSpan(offset=0, item=item, rows=())]


MOONSHINE = Family(
    architecture="MoonshineForConditionalGeneration",
    make_config=_moonshine,
    chat_template=TEXTS,  # published ones have none
    eos_token=LAST[0],
    last_tokens=LAST,
    files={
        "preprocessor_config.json": {
            "feature_extractor_type": "Wav2Vec2FeatureExtractor",
            "do_normalize": False,
            "feature_size": 1,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": True,
            "sampling_rate": 16000,
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
MOONSHINE_STREAMING = replace(
    MOONSHINE,
    architecture="MoonshineStreamingForConditionalGeneration",
    make_config=_streaming,
)
