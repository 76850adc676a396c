"""Tiny checkpoints of Gemma 4: the text model, and the model with images and videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import (
    Family,
    MediaForm,
    lines,
    media_kinds,
    sound_inputs,
    text_config,
)

from .tiny import TEMPLATE as TEXT_TEMPLATE

AUDIO, START_AUDIO, END_AUDIO = "<|audio|>", "<|audio>", "<audio|>"
IMAGE, START, END, VIDEO = "<|image|>", "<|image>", "<image|>", "<|video|>"
MODEL_TURN = "{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}"
TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<|turn>' ~ m.role ~ '\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}{{- '\\n\\n" + IMAGE + "\\n\\n' -}}"
    "{%- elif part.type == 'video' -%}{{- '\\n\\n" + VIDEO + "\\n\\n' -}}"
    "{%- elif part.type == 'audio' -%}{{- '" + AUDIO + "' -}}"
    "{%- else -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<turn|>\\n' -}}{%- endfor -%}" + MODEL_TURN
)
KINDS = ["sliding_attention", "full_attention"]


TOKENS = {
    "audio_token_id": AUDIO,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "boi_token_id": START,
    "eoi_token_id": END,
}


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
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [128, 4],  # the first is that of the frames
            "output_proj_dims": 24,
        },
        tie_word_embeddings=text["tie_word_embeddings"],
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()},
    )


GEMMA4_TEXT = Family(
    architecture="Gemma4ForCausalLM",
    make_config=_gemma4_text,
    chat_template=TEXT_TEMPLATE,
    eos_token="</s>",
)


def _merge(config: Any) -> int:
    return int(config.vision_config.pooling_kernel_size)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns images and frames: line by line, channels last."""
    return _padded(ids, media, _merge(config), lambda frame, places, _: (frame, places))


def _padded(
    ids: Tensor,
    media: Sequence[MediaSpan],
    merge: int,
    arrange: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """Returns images and frames, all padded to the largest. arrange: of patches, line by line with
    channels last, and their (column, row)."""
    inputs = {"mm_token_type_ids": media_kinds(ids, media)}
    inputs |= sound_inputs(media)

    def made(item: MediaInput) -> tuple[list[Tensor], Tensor]:
        frames, places = lines(item, merge)
        found = [arrange(frame, places, merge) for frame in frames]
        return [frame for frame, _ in found], found[0][1]

    seen = [made(span.item)[0] for span in media if span.item.kind != "audio"]
    longest = max((len(frame) for frames in seen for frame in frames), default=0)
    names = {"image": ("pixel_values", "image"), "video": ("pixel_values_videos", "video")}
    for kind, (pixels_name, prefix) in names.items():
        items = [made(span.item) for span in media if span.item.kind == kind]
        frames = [frame for found, _ in items for frame in found]
        if frames:
            pad = [(0, 0, 0, longest - len(frame)) for frame in frames]
            places = [places for found, places in items for _ in found]
            inputs[pixels_name] = torch.stack(list(map(F.pad, frames, pad)))
            padded = [F.pad(own, by, value=-1) for own, by in zip(places, pad, strict=True)]
            inputs[f"{prefix}_position_ids"] = torch.stack(padded)
        if kind == "video" and items:
            inputs["num_frames_per_video"] = torch.tensor([len(found) for found, _ in items])
    return inputs


def _unified(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text(tokenizer, {})
    fields = {name: value for name, value in fields.items() if "per_layer_input" not in name}
    text = {**fields, "sliding_window": 9, **options}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    vision = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 40}
    return transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config={**vision, "mm_posemb_size": 128, "output_proj_dims": 40},
        audio_config={"audio_embed_dim": 640},
        tie_word_embeddings=text["tie_word_embeddings"],
        **ids,
    )


def _in_blocks(frame: Tensor, places: Tensor, merge: int) -> tuple[Tensor, Tensor]:
    """Returns the blocks of merge x merge patches of a frame, line by line with channels last, and
    their (column, row)."""
    columns, rows = (places.max(0).values + 1).tolist()
    side = round((frame.shape[1] // 3) ** 0.5)
    cells = frame.view(rows // merge, merge, columns // merge, merge, side, side, 3)
    blocks = cells.permute(0, 2, 1, 4, 3, 5, 6).reshape(-1, merge**2 * frame.shape[1])
    own = torch.arange(len(blocks))
    return blocks, torch.stack([own % (columns // merge), own // (columns // merge)], -1)


def _mend_masks() -> None:
    """Gives transformers' forward of Gemma 4 Unified the masks of its generate, which are those of
    Gemma 4: the tokens of an image see each other in layers with a window only. As it is, forward
    lets them in the other layers too, so a prompt has other logits in it than in generate."""
    from transformers.models.gemma4_unified import modeling_gemma4_unified as module

    if not isinstance(module.create_masks_for_generate, partial):
        module.create_masks_for_generate = partial(
            _masks, module.create_masks_for_generate, module.create_masks_for_vision_model
        )


def _masks(
    plain: Callable[..., Any],
    for_vision: Callable[..., Any],
    block_sequence_ids: Tensor | None = None,
    **given: Any,
) -> Any:
    if block_sequence_ids is None:
        return plain(**given)
    return for_vision(block_sequence_ids=block_sequence_ids, **given)


def _unified_inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns images and frames in blocks of pixels."""
    _mend_masks()
    return _padded(ids, media, _merge(config), _in_blocks)


GEMMA4 = Family(
    architecture="Gemma4ForConditionalGeneration",
    make_config=_gemma4,
    chat_template=TEMPLATE,
    eos_token="</s>",
    special_tokens=(IMAGE, START, END, VIDEO, AUDIO, START_AUDIO, END_AUDIO),
    named_tokens={
        "image_token": IMAGE,
        "boi_token": START,
        "eoi_token": END,
        "audio_token": AUDIO,
        "boa_token": START_AUDIO,
        "eoa_token": END_AUDIO,
    },
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
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "feature_extractor": {
                "feature_extractor_type": "Gemma4AudioFeatureExtractor",
                "sampling_rate": 16000,
            },
        },
    },
    media=MediaForm(inputs=_inputs, merge_size=_merge, has_text_between=True),
)

GEMMA4_UNIFIED = Family(
    architecture="Gemma4UnifiedForConditionalGeneration",
    make_config=_unified,
    chat_template=TEMPLATE,
    eos_token="</s>",
    special_tokens=(IMAGE, START, END, VIDEO, AUDIO, START_AUDIO, END_AUDIO),
    named_tokens={
        "image_token": IMAGE,
        "boi_token": START,
        "eoi_token": END,
        "audio_token": AUDIO,
        "boa_token": START_AUDIO,
        "eoa_token": END_AUDIO,
    },
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Gemma4UnifiedImageProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 70,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Gemma4UnifiedVideoProcessor",
            "patch_size": 4,
            "pooling_kernel_size": 3,
            "max_soft_tokens": 70,
            "num_frames": 3,
        },
        "processor_config.json": {
            "processor_class": "Gemma4UnifiedProcessor",
            "feature_extractor": {
                "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
                "sampling_rate": 16000,
            },
        },
    },
    media=MediaForm(inputs=_unified_inputs, merge_size=_merge, has_text_between=True),
)
