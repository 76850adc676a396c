"""Tiny checkpoints of Canary and Cohere ASR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm
from mmdeploy_llm_plugins.encoder_decoder.prompts import TEXTS

NUM_MELS = 20
LANGUAGES = ("<|en|>", "<|de|>", "<|fr|>")
LAST = (  # after the words
    "<|endoftext|>",
    "▁",
    "<|startofcontext|>",
    "<|startoftranscript|>",
    "<|emo:undefined|>",
    *LANGUAGES,
    "<|pnc|>",
    "<|nopnc|>",
    "<|noitn|>",
    "<|notimestamp|>",
    "<|nodiarize|>",
)
END, LEAD, CONTEXT = VOCAB_SIZE, VOCAB_SIZE + 1, VOCAB_SIZE + 2
IDS = {
    "vocab_size": VOCAB_SIZE + len(LAST),
    "bos_token_id": VOCAB_SIZE + 3,
    "eos_token_id": END,
    "pad_token_id": END,
}
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def _encoder(size: int, **options: Any) -> dict[str, Any]:
    return {
        "model_type": "parakeet_encoder",
        "hidden_size": size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "conv_kernel_size": 5,
        "subsampling_factor": 4,
        "subsampling_conv_channels": 12,
        "num_mel_bins": NUM_MELS,
        **options,
    }


def _canary(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    decoder = {**DECODER, **IDS, "decoder_start_token_id": CONTEXT, **options}
    return transformers.CanaryConfig(
        **IDS,
        decoder_start_token_id=CONTEXT,
        tie_word_embeddings=decoder.pop("tie_word_embeddings", True),
        encoder_config=_encoder(64, scale_input=False),
        decoder_config=decoder,
    )


def _cohere_asr(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    encoder = _encoder(48, scale_input=True, attention_bias=False, subsampling_conv_kernel_size=5)
    fields = {**DECODER, **IDS, "decoder_start_token_id": LEAD, "encoder_config": encoder}
    return transformers.CohereAsrConfig(**{**fields, "hidden_act": "silu", **options})


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    return {**span.item.tensors, "decoder_input_ids": ids}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and random frames of which the last is masked."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (30,), generator=generator)
    count = 101 + 10 * (seed % 5)
    mask = torch.arange(count)[None] < count - 1
    frames = torch.randn(1, count, NUM_MELS, generator=generator) * mask[..., None]
    item = MediaInput(
        kind="audio",
        tensors={"input_features": frames, "attention_mask": mask},
        num_tokens=-(-(count - 1) // 4),
        key=f"fastconformer-{seed}",
    )
    start = config.decoder_start_token_id
    return [start, *words.tolist()], [MediaSpan(offset=0, item=item, rows=())]


def _family(name: str, make_config: Any, extractor: str, **fields: Any) -> Family:
    return Family(
        architecture=f"{name}ForConditionalGeneration",
        make_config=make_config,
        chat_template=TEXTS,
        eos_token=LAST[0],
        last_tokens=LAST,
        files={
            "preprocessor_config.json": {
                "feature_extractor_type": extractor,
                "feature_size": NUM_MELS,
                "hop_length": 160,
                "n_fft": 512,
                "win_length": 400,
                "preemphasis": 0.97,
                "padding_side": "right",
                "padding_value": 0.0,
                "return_attention_mask": True,
                "sampling_rate": 16000,
                **fields,
            }
        },
        media=MediaForm(inputs=_inputs, prompt=_prompt),
    )


CANARY = _family("Canary", _canary, "ParakeetFeatureExtractor")
COHERE_ASR = _family(
    "CohereAsr", _cohere_asr, "CohereAsrFeatureExtractor", dither=1e-5, max_audio_clip_s=8.0
)
