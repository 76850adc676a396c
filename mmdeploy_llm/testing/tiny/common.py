"""Shared code of the tiny checkpoints: tokenizer, sizes, random weights, the class Family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from mmdeploy_llm.request import MediaInput, MediaSpan

from .media import MediaForm

# Of two ways in which families mark images and videos, so that a tokenizer without a family reads
# prompts with media.
SPECIAL_TOKENS = (
    "<pad>",
    "<unk>",
    "<s>",
    "</s>",
    "<|begin_of_sentence|>",
    "<|end_of_sentence|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|IMAGE_START|>",
    "<|IMAGE_PLACEHOLDER|>",
    "<|IMAGE_END|>",
    "<|VIDEO_START|>",
    "<|VIDEO_PLACEHOLDER|>",
    "<|VIDEO_END|>",
    "<|image@placeholder|>",
    "<|video@placeholder|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TEXT_TOKENS = ("<think>", "</think>", "<response>", "</response>")  # single tokens, not special
VOCAB_SIZE = 384

CORPUS = (
    "The quick brown fox jumps over the lazy dog. User: Describe the picture. Assistant: A red "
    "circle and a blue square on a white background; how many are there? There are two of them.\n"
)
# The form of chats that many families share.
CHATML = (
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
IMAGE_MEAN = [0.48145466, 0.4578275, 0.40821073]
IMAGE_STD = [0.26862954, 0.26130258, 0.27577711]
# Buffers that training sets in some families -> what they are near to.
LEARNED_BUFFERS = {
    "layer_scalar": 1.0,
    "std_bias": 0.0,
    "std_scale": 1.0,
    "input_min": -1.0,
    "input_max": 1.0,
    "output_min": -1.0,
    "output_max": 1.0,
    "expert_bias": 0.0,
    "e_score_correction_bias": 0.0,
    "running_mean": 0.0,
    "running_var": 1.0,
}
MIN_PIXELS = 56 * 56
MAX_PIXELS = 28 * 28 * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to write the tiny checkpoint of a family.

    architecture: the model's class in transformers.
    make_config: (tokenizer, replaced fields of the text model's config) -> transformers' config.
    special_tokens: special tokens in addition to SPECIAL_TOKENS. last_tokens: those that have the
        largest ids, in this order.
    generation: tokenizer -> further values of generation_config.json.
    named_tokens: names by which transformers' processor asks the tokenizer for tokens of media,
        such as image_token, with their texts.
    files: further JSON files of the folder, name -> contents.
    media: how transformers takes the family's images and videos.
    is_embedder: the model gives vectors or scores and cannot generate.
    frames: what the tokenizer writes around a text and around a pair of texts, in the form of
        tokenizers' TemplateProcessing; None: nothing.
    """

    architecture: str
    make_config: Callable[[Any, Mapping[str, Any]], Any]
    chat_template: str = CHATML
    eos_token: str = "<|im_end|>"
    special_tokens: tuple[str, ...] = ()
    last_tokens: tuple[str, ...] = ()
    generation: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    media: MediaForm = field(default_factory=MediaForm)
    is_embedder: bool = False
    frames: tuple[str, str] | None = None


def text_family(
    architecture: str,
    *,
    chat_template: str = CHATML,
    eos_token: str = "<|im_end|>",
    special_tokens: tuple[str, ...] = (),
    **fields: Any,
) -> Family:
    """Returns the Family of a text model. fields: those in which its config differs from
    text_config's."""

    def make_config(tokenizer: Any, options: Mapping[str, Any]) -> Any:
        config_class = getattr(transformers, architecture).config_class
        return config_class(**text_config(tokenizer, options, **fields))

    return Family(
        architecture=architecture,
        make_config=make_config,
        chat_template=chat_template,
        eos_token=eos_token,
        special_tokens=special_tokens,
    )


def randomize(model: nn.Module) -> None:
    """Fills all parameters with random values (torch's global generator) that keep activations
    near 1. A norm's weight that starts at zero stays near zero: the norm adds 1 to it."""
    for name, parameter in model.named_parameters():
        values = torch.randn_like(parameter)
        if "norm" in name.lower() or ".ln" in name:
            is_centered = not parameter.any()
            shift = 1.0 if name.endswith("weight") and not is_centered else 0.0
            parameter.data = values * 0.1 + shift
        elif name.endswith("gate") and parameter.numel() == 1:  # nothing would pass through 0
            parameter.data = values * 0.1 + 0.7
        elif parameter.ndim < 2 or "correction_bias" in name:
            parameter.data = values * 0.05
        elif "embed_tokens" in name:
            parameter.data = values * 0.3
        else:
            fan_in = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            parameter.data = values / fan_in**0.5
    for name, buffer in model.named_buffers():
        middle = LEARNED_BUFFERS.get(name.rpartition(".")[2])
        if middle is not None:
            buffer.data = middle + 0.2 * torch.randn_like(buffer)


def randomize_empty(module: nn.Module) -> None:
    """The same for the engine's own modules, whose parameters are memory without values."""
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    randomize(module)


def build_tokenizer(
    *,
    chat_template: str,
    eos_token: str,
    special_tokens: Sequence[str] = (),
    last_tokens: Sequence[str] = (),
    named_tokens: Mapping[str, str] | None = None,
    frames: tuple[str, str] | None = None,
) -> transformers.PreTrainedTokenizerFast:
    """Trains a byte-level BPE with SPECIAL_TOKENS and more special tokens. It encodes any text, and
    decoding restores the text. last_tokens, frames: see Family."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *TEXT_TOKENS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    if frames is not None:
        known = [(name, tokenizer.token_to_id(name)) for name in SPECIAL_TOKENS]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=frames[0], pair=frames[1], special_tokens=known
        )
    tokenizer.add_special_tokens([*last_tokens])
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["content"] not in TEXT_TOKENS
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        bos_token="<s>",
        eos_token=eos_token,
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template=chat_template,
        **({"extra_special_tokens": dict(named_tokens)} if named_tokens else {}),
        **({"cls_token": "<s>", "sep_token": "</s>"} if frames else {}),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def text_config(
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


def token_ids(
    tokenizer: transformers.PreTrainedTokenizerFast, names: Mapping[str, str]
) -> dict[str, int]:
    return {field: tokenizer.convert_tokens_to_ids(text) for field, text in names.items()}


def preprocessor_files(
    prefix: str, *, image: Mapping[str, Any] | None = None, video: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Returns preprocessor_config.json and video_preprocessor_config.json of a family.

    prefix: its processors are <prefix>ImageProcessor and <prefix>VideoProcessor.
    image, video: fields that differ from the shared ones.
    """
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
        "temporal_patch_size": 2,
    }
    return {
        "preprocessor_config.json": {
            **shared,
            "image_processor_type": f"{prefix}ImageProcessor",
            **(image or {}),
        },
        "video_preprocessor_config.json": {
            **shared,
            "video_processor_type": f"{prefix}VideoProcessor",
            **(video or {}),
        },
    }


def picture_prompt(
    start: int, num_tokens: int, size: tuple[int, int], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns random tokens after `start`, and a random picture that an encoder reads, of (height,
    width)."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (30,), generator=generator)
    item = MediaInput(
        kind="image",
        tensors={"pixel_values": torch.randn(1, 3, *size, generator=generator)},
        num_tokens=num_tokens,
        key=f"picture-{seed}",
    )
    return [start, *words.tolist()], [MediaSpan(offset=0, item=item, rows=())]
