"""write_checkpoint: writes a small checkpoint with random weights for any transformers config."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.testing.tiny import make_tokenizer, randomize

AUTO_CLASSES = ("AutoModelForImageTextToText", "AutoModelForCausalLM")


def write_checkpoint(
    config: Any,
    folder: Path,
    *,
    tokenizer: Any = None,
    architecture: str | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Writes a checkpoint of `config`, a transformers config with small sizes, and returns its
    folder.

    The same seed yields the same weights; all are random, so that tests detect a misplaced one.
    tokenizer: None uses `make_tokenizer()`, which encodes any text.
    architecture: the model's class in transformers; None uses the config's.
    files: further files, name -> contents.
    Raises ConfigError when the vocabulary is too small or transformers has no such class.
    """
    tokenizer = make_tokenizer() if tokenizer is None else tokenizer
    vocab_size = config.get_text_config().vocab_size
    if vocab_size < len(tokenizer):
        raise ConfigError(
            f"the config has vocab_size = {vocab_size}, the tokenizer {len(tokenizer)} tokens; "
            "make the config with vocab_size=len(tokenizer)"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(config, architecture)
        randomize(model)
    model = model.to(dtype)
    model.generation_config = transformers.GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, contents in (files or {}).items():
        (Path(folder) / name).write_text(contents, "utf-8")
    return Path(folder)


def _new_model(config: Any, architecture: str | None) -> Any:
    """Builds transformers' model of the config, by class name or through the Auto classes."""
    architecture = architecture or next(iter(config.architectures or ()), None)
    if architecture is not None:
        found = getattr(transformers, architecture, None)
        if found is None:
            raise ConfigError(
                f"transformers {transformers.__version__} has no class {architecture!r}; set "
                "`architecture` to an existing class"
            )
        return found(config)
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config, trust_remote_code=False)
    raise ConfigError(
        f"transformers has no model that generates text for {type(config).__name__}; set "
        "`architecture` to the model's class"
    )
