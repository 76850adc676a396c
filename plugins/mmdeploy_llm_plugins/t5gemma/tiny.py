"""A tiny checkpoint of T5Gemma 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm, text_config, tiles
from mmdeploy_llm_plugins.gemma.tiny3 import END, GEMMA3, SIDE, START, TOKEN

NUM_TOKENS, PATCH, MERGE = 4, 14, 2  # of a picture: 4 x 4 patches
ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _t5gemma2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    own: dict[str, Any] = {
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": ROPE,
        "sliding_window": 7,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    }
    text = text_config(tokenizer, {**own, **options})
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    ids = tokenizer.convert_tokens_to_ids
    encoder = transformers.T5Gemma2EncoderConfig(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**vision, vision_use_head=False),
        mm_tokens_per_image=NUM_TOKENS,
        image_token_index=ids(TOKEN),
        boi_token_index=ids(START),
        eoi_token_index=ids(END),
    )
    return transformers.T5Gemma2Config(
        encoder=encoder,
        decoder=transformers.T5Gemma2DecoderConfig(**text),
        image_token_index=ids(TOKEN),  # over that of the encoder
    )


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    found = {"input_ids": span.item.tensors["input_ids"][None], "decoder_input_ids": ids}
    if "pixels" in span.item.tensors:
        found["pixel_values"] = tiles(span.item, MERGE, PATCH)
    return found


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and a random text with a picture for each grid."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (45 + seed,), generator=generator)
    own = words[30:].tolist()
    for _ in grids:
        picture = [config.encoder.image_token_id] * NUM_TOKENS
        own += [config.encoder.boi_token_id, *picture, config.encoder.eoi_token_id, 99]
    tensors = {"input_ids": torch.tensor(own)}
    if grids:
        num_patches = len(grids) * (SIDE // PATCH) ** 2
        tensors["pixels"] = torch.randn(num_patches, 3 * PATCH**2, generator=generator)
    item = MediaInput(
        kind="image" if grids else "text",
        tensors=tensors,
        num_tokens=len(own),
        key=f"t5gemma-{seed}",
        grid_thw=(len(grids), SIDE // PATCH, SIDE // PATCH),
    )
    start = config.decoder.bos_token_id
    return [start, *words[:30].tolist()], [MediaSpan(offset=0, item=item, rows=())]


T5GEMMA2 = Family(
    architecture="T5Gemma2ForConditionalGeneration",
    make_config=_t5gemma2,
    chat_template=GEMMA3.chat_template,
    eos_token="</s>",
    special_tokens=GEMMA3.special_tokens,
    named_tokens=GEMMA3.named_tokens,
    files=GEMMA3.files,
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
