"""Writes tiny random checkpoints of model families: config, safetensors, tokenizer, chat template
and preprocessor files, all written by transformers, for tests against transformers.

A plugin describes its own: `ModelSpec(tiny="module:FAMILY")` names a Family, which `write_tiny`
finds among the installed plugins by the family's name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import ModelSpec, PluginManager
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.names import did_you_mean

from .common import (
    CHATML,
    IMAGE_MEAN,
    IMAGE_STD,
    MAX_PIXELS,
    MIN_PIXELS,
    VOCAB_SIZE,
    Family,
    build_tokenizer,
    picture_prompt,
    preprocessor_files,
    randomize,
    randomize_empty,
    text_config,
    text_family,
    token_ids,
)
from .media import (
    MediaForm,
    grid_inputs,
    lines,
    media_kinds,
    merge_size,
    patch_size,
    sound_inputs,
    tiles,
)

__all__ = [
    "CHATML",
    "IMAGE_MEAN",
    "IMAGE_STD",
    "MAX_PIXELS",
    "MIN_PIXELS",
    "VOCAB_SIZE",
    "Family",
    "MediaForm",
    "families",
    "family_of",
    "form_of",
    "generating",
    "grid_inputs",
    "lines",
    "make_tokenizer",
    "media_kinds",
    "merge_size",
    "patch_size",
    "picture_prompt",
    "preprocessor_files",
    "randomize",
    "randomize_empty",
    "sound_inputs",
    "text_config",
    "text_family",
    "tiles",
    "token_ids",
    "tokenizer_of",
    "write_family",
    "write_tiny",
    "write_without_weights",
]


def families() -> dict[str, ModelSpec]:
    """Returns name -> spec of the installed families that have a tiny checkpoint; of two with one
    name that with the higher priority."""
    found = [spec for spec in PluginManager.load().models if spec.tiny is not None]
    return {spec.name: spec for spec in sorted(found, key=lambda spec: spec.priority)}


def generating() -> dict[str, ModelSpec]:
    """Returns those of `families` that generate text."""
    return {name: spec for name, spec in families().items() if not family_of(spec).is_embedder}


def family_of(spec: ModelSpec) -> Family:
    """Imports the Family that `spec.tiny` names. Raises PluginContractError for anything else."""
    found = imported(spec.tiny) if spec.tiny is not None else None
    if not isinstance(found, Family):
        raise PluginContractError(
            f"model {spec.name!r}: tiny = {spec.tiny!r} must name a Family of "
            f"mmdeploy_llm.testing.tiny, got {type(found).__name__}"
        )
    return found


def form_of(architectures: Sequence[str] | None) -> MediaForm:
    """Returns how transformers takes the media of these architectures: what the installed family
    says that serves the first, else the common form."""
    first = next(iter(architectures or ()), "")
    served = [spec for spec in families().values() if first in spec.architectures]
    return family_of(served[-1]).media if served else MediaForm()


def write_tiny(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **text_options: Any,
) -> Path:
    """Writes a tiny checkpoint of `family`, the name of an installed model family, and returns its
    folder.

    The same seed yields the same weights. Every parameter is random, including norm weights and
    biases, so that tests detect a misplaced one.
    text_options: replacements for fields of the text model's config.
    Raises KeyError for an unknown family.
    """
    return write_family(
        _named(family),
        folder,
        seed=seed,
        dtype=dtype,
        max_shard_size=max_shard_size,
        **text_options,
    )


def write_family(
    described: Family,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **text_options: Any,
) -> Path:
    """Writes the tiny checkpoint of a family that need not be installed, see `write_tiny`."""
    tokenizer = tokenizer_of(described)
    config = described.make_config(tokenizer, text_options)
    _write_files(described, tokenizer, folder)
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
        decoder_start_token_id=getattr(config.get_text_config(), "decoder_start_token_id", None),
        **described.generation(tokenizer),
    )
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def write_without_weights(described: Family, folder: Path) -> Path:
    """Writes the files of a family's tiny checkpoint that media processors read: config, tokenizer
    and preprocessors. Returns the folder."""
    tokenizer = tokenizer_of(described)
    config = described.make_config(tokenizer, {})
    config.architectures = [described.architecture]
    config.save_pretrained(folder)
    _write_files(described, tokenizer, folder)
    return folder


def _write_files(described: Family, tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    for name, contents in described.files.items():
        (folder / name).write_text(json.dumps(contents, indent=2), "utf-8")


def make_tokenizer(family: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Returns the family's tokenizer with its chat template, see common.build_tokenizer. None: one
    without a family, with the template CHATML."""
    if family is None:
        return build_tokenizer(chat_template=CHATML, eos_token="<|im_end|>")
    return tokenizer_of(_named(family))


def tokenizer_of(described: Family) -> transformers.PreTrainedTokenizerFast:
    """Returns the tokenizer of a family that need not be installed."""
    return build_tokenizer(
        chat_template=described.chat_template,
        eos_token=described.eos_token,
        special_tokens=described.special_tokens,
        last_tokens=described.last_tokens,
        named_tokens=described.named_tokens,
        frames=described.frames,
    )


def _named(name: str) -> Family:
    installed = families()
    if name not in installed:
        raise KeyError(f"no installed family is named {name!r}{did_you_mean(name, installed)}")
    return family_of(installed[name])
