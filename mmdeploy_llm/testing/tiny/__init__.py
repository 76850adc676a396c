"""Writes tiny random checkpoints of this package's families: config, safetensors, tokenizer, chat
template and preprocessor files, all written by transformers, for tests against transformers.

Each module holds the FAMILIES of one plugin; common.py holds shared code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from . import (
    ernie,
    gemma,
    gemma3,
    gemma4,
    glm,
    glm_vision,
    gptoss,
    granite,
    internvl,
    lfm,
    llama,
    minicpm,
    olmo,
    paddleocr,
    phi,
    qwen,
    qwen35,
    qwen_vl,
)
from .common import (
    ERNIE_TOKENS,
    IMAGE_MEAN,
    IMAGE_STD,
    MAX_PIXELS,
    MIN_PIXELS,
    QWEN_TOKENS,
    VOCAB_SIZE,
    Family,
    build_tokenizer,
    randomize,
    randomize_empty,
)

FAMILIES: Mapping[str, Family] = {
    **ernie.FAMILIES,
    **gemma.FAMILIES,
    **gemma3.FAMILIES,
    **gemma4.FAMILIES,
    **glm.FAMILIES,
    **glm_vision.FAMILIES,
    **gptoss.FAMILIES,
    **granite.FAMILIES,
    **internvl.FAMILIES,
    **lfm.FAMILIES,
    **llama.FAMILIES,
    **minicpm.FAMILIES,
    **olmo.FAMILIES,
    **paddleocr.FAMILIES,
    **phi.FAMILIES,
    **qwen.FAMILIES,
    **qwen35.FAMILIES,
    **qwen_vl.FAMILIES,
}
ARCHITECTURES: Mapping[str, str] = {name: fam.architecture for name, fam in FAMILIES.items()}

__all__ = [
    "ARCHITECTURES",
    "ERNIE_TOKENS",
    "FAMILIES",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "MAX_PIXELS",
    "MIN_PIXELS",
    "QWEN_TOKENS",
    "VOCAB_SIZE",
    "Family",
    "make_tokenizer",
    "randomize",
    "randomize_empty",
    "write_tiny",
]


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

    The same seed yields the same weights. Every parameter is random, including norm weights and
    biases, so that tests detect a misplaced one.
    text_options: replacements for fields of the text model's config.
    Raises KeyError for an unknown family.
    """
    described = FAMILIES[family]
    tokenizer = make_tokenizer(family)
    config = described.make_config(tokenizer, text_options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, described.architecture)(config)
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
    for name, contents in described.files.items():
        (folder / name).write_text(json.dumps(contents, indent=2), "utf-8")
    return folder


def make_tokenizer(family: str = "qwen2") -> transformers.PreTrainedTokenizerFast:
    """Returns the family's tokenizer with its chat template, see common.build_tokenizer."""
    return build_tokenizer(FAMILIES[family])
