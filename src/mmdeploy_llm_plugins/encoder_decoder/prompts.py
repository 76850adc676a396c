"""Holds what the rules of these families share: see hooks.EncoderPrompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmdeploy_llm.errors import CheckpointError, MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput


def one_item(media: Sequence[MediaInput], kind: str) -> MediaInput:
    """Returns the only item. Raises MediaError for none or several."""
    if len(media) != 1:
        raise MediaError(f"this model takes one {kind} in each prompt, found {len(media)}")
    return media[0]


def setting(checkpoint: Checkpoint, config: Any, name: str) -> Any:
    """Returns a value of generation_config.json, else of `config`, the decoder's; None without."""
    found = checkpoint.generation.get(name)
    return getattr(config, name, None) if found is None else found


def start_id(checkpoint: Checkpoint, *configs: Any) -> int:
    """Returns the first token of the decoder. Raises CheckpointError where nothing names it."""
    for config in configs:
        found = setting(checkpoint, config, "decoder_start_token_id")
        if isinstance(found, int):
            return found
    raise CheckpointError(
        "neither generation_config.json nor config.json has decoder_start_token_id, with which the "
        "decoder begins"
    )
