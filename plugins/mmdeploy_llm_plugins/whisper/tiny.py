"""A tiny checkpoint of Whisper, which hears four seconds at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEXTS

NUM_FRAMES, NUM_MELS = 400, 16
LANGUAGES = ("<|en|>", "<|de|>", "<|zh|>")
TASKS = ("<|translate|>", "<|transcribe|>")
# In the order of published ones, after the words.
LAST = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *LANGUAGES,
    *TASKS,
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
    *(f"<|{step * 0.02:.2f}|>" for step in range(NUM_FRAMES // 2 + 1)),
)
END, START = VOCAB_SIZE, VOCAB_SIZE + 1
NO_TIMES = VOCAB_SIZE + LAST.index("<|notimestamps|>")


def _whisper(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = {
        "vocab_size": VOCAB_SIZE + len(LAST),
        "num_mel_bins": NUM_MELS,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 80,
        "max_source_positions": NUM_FRAMES // 2,
        "max_target_positions": 128,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        **options,
    }
    return transformers.WhisperConfig(**fields)


def _generation(tokenizer: Any) -> Mapping[str, Any]:
    """Returns what published checkpoints have in generation_config.json."""
    ids = tokenizer.convert_tokens_to_ids
    return {
        "lang_to_id": {token: ids(token) for token in LANGUAGES},
        "task_to_id": {token[2:-2]: ids(token) for token in TASKS},
        "is_multilingual": True,
        "no_timestamps_token_id": NO_TIMES,
        "prev_sot_token_id": ids("<|startofprev|>"),
        "max_initial_timestamp_index": 10,
        "suppress_tokens": [30, 31, *range(START, NO_TIMES)],
        "begin_suppress_tokens": [ids("a"), END],
        "return_timestamps": False,
    }


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    frames = span.item.tensors["input_features"]
    return {"input_features": frames, "decoder_input_ids": ids}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and random frames of a sound."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (30,), generator=generator)
    item = MediaInput(
        kind="audio",
        tensors={"input_features": torch.randn(1, NUM_MELS, NUM_FRAMES, generator=generator)},
        num_tokens=NUM_FRAMES // 2,
        key=f"whisper-{seed}",
    )
    return [START, *words.tolist()], [MediaSpan(offset=0, item=item, rows=())]


WHISPER = Family(
    architecture="WhisperForConditionalGeneration",
    make_config=_whisper,
    chat_template=TEXTS,  # published ones have none
    eos_token=LAST[0],
    last_tokens=LAST,
    generation=_generation,
    files={
        "preprocessor_config.json": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "chunk_length": NUM_FRAMES // 100,
            "feature_size": NUM_MELS,
            "hop_length": 160,
            "n_fft": 400,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
            "sampling_rate": 16000,
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
