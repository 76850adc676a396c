"""Frequencies of scaled rotary embeddings, which transformers computes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import torch

# Variants whose frequencies are the same for every sequence length.
# "dynamic" changes beyond max_position_embeddings only, where no sequence may go.
STATIC_ROPE_TYPES = ("dynamic", "linear", "llama3", "yarn")
LONG_ROPE_TYPE = "longrope"  # has frequencies for short and for long sequences
# Of what stands in for a config: a mark of its class, and what `all_frequencies` has returned.
STANDS_IN, FREQUENCIES = "_stands_in", "_rope_frequencies"


def scaled_frequencies(
    config: Any, kind: str, *, layers: str | None = None, seq_len: int | None = None
) -> tuple[tuple[float, ...], float]:
    """Returns the frequencies and the factor of a scaled variant. layers: those whose rope it is,
    where rope_parameters have several. seq_len: tokens, where they depend on it."""
    if hasattr(type(config), STANDS_IN):
        for *key, values, scale in getattr(config, FREQUENCIES, ()):
            if key == [layers, kind, seq_len]:
                return tuple(values), scale
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    own = config
    if layers is not None:
        own = copy(config)
        own.rope_parameters = config.rope_parameters[layers]
    with torch.device("cpu"):  # the model itself is built on "meta"
        values, scale = ROPE_INIT_FUNCTIONS[kind](own, device="cpu", seq_len=seq_len)
    return tuple(values.tolist()), float(scale)


def all_frequencies(config: Any) -> list[list[Any]]:
    """Returns what `scaled_frequencies` returns for all that a config can be asked for, each after
    layers, kind and seq_len."""
    rope = getattr(config, "rope_parameters", None) or {}
    is_one = not any(isinstance(each, Mapping) for each in rope.values())
    found: list[list[Any]] = []
    for layers, own in {None: rope}.items() if is_one else rope.items():
        kind = own.get("rope_type") if isinstance(own, Mapping) else None
        lengths: tuple[int | None, ...] = (None,) if kind in STATIC_ROPE_TYPES else ()
        if kind == LONG_ROPE_TYPE:
            lengths = (None, long_after(own) + 1)
        for seq_len in lengths:
            values = scaled_frequencies(config, str(kind), layers=layers, seq_len=seq_len)
            found.append([layers, kind, seq_len, *values])
    return found


def long_after(rope: Mapping[str, Any]) -> int:
    """Returns the tokens after which a sequence has the frequencies of long ones."""
    return int(rope["original_max_position_embeddings"])
