"""Finds the longest sequences for which a model is exact: beyond them it uses other frequencies, or
chooses or forgets tokens."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import DynamicCache

from mmdeploy_llm.errors import RequestError

from . import rope, structure

# How many tokens a model chooses to attend to: all of them up to that length. Beyond, it depends on
# rounding, and in some models on the steps in which they came.
CHOSEN = ("index_topk", "keep_window_size", "indexer_budget")
# How many tokens a model attends to as any other does: longer sequences are filled up to chunks.
CHUNKS = ("local_attn_chunk_length", "lsh_attn_chunk_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Says up to which length a model is exact. num_tokens: the longest sequence; None: any.
    reason: what the model does beyond it."""

    num_tokens: int | None = None
    reason: str = ""

    def and_also(self, other: Limit) -> Limit:
        """Returns the shorter of two limits."""
        return min(self, other, key=lambda limit: limit.num_tokens or sys.maxsize)

    def check(self, name: str, positions: Tensor) -> None:
        """Raises RequestError when a position of the step is beyond the limit."""
        if self.num_tokens is None:
            return
        last = int(positions.max())
        if last >= self.num_tokens:
            raise RequestError(
                f"{name} {self.reason} for sequences of more than {self.num_tokens} tokens, which "
                f"transformers_any cannot do; found a token at position {last}; set "
                f"max_model_len={self.num_tokens} or use a plugin made for this model"
            )


def of_decoder(name: str, decoder: nn.Module, *, follows_length: bool = False) -> Limit:
    """Returns the limit of a decoder. Raises ModelNotSupportedError where every length has
    frequencies of its own. follows_length: whether each token has the frequencies of its sequence's
    length; see rope.follow."""
    config: Any = decoder.config
    found = rope.check(name, decoder)
    if found is not None and not follows_length:
        return Limit(num_tokens=found, reason="uses other rotary frequencies")
    _, count = structure.positions_of(decoder)
    if count is not None:
        return Limit(num_tokens=count, reason="has no positions")
    for field in CHOSEN:
        chosen = getattr(config, field, None)
        if type(chosen) is int:
            count = chosen * _tokens_of_entry(config)
            return Limit(num_tokens=count, reason="chooses tokens by their scores")
    return Limit()


def of_chunks(config: Any) -> Limit:
    """Returns the limit of a model that divides longer sequences into chunks (Reformer)."""
    sizes = [size for field in CHUNKS if type(size := getattr(config, field, None)) is int]
    return Limit(num_tokens=min(sizes), reason="attends in chunks") if sizes else Limit()


def _tokens_of_entry(config: Any) -> int:
    """Returns how many tokens one of the entries that are chosen stands for (DeepSeek V4)."""
    rates = getattr(config, "compress_rates", None) or {}
    return int(rates.get("compressed_sparse_attention", 1))


def of_windows(config: Any, windows: Mapping[int, int | None]) -> Limit:
    """Returns the limit of a model whose attention, over a whole sequence, sees tokens that
    transformers' cache has forgotten. Beyond it an answer depends on the steps in which the tokens
    came.

    windows: layer -> the window of its attention; None: it sees all tokens.
    """
    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # transformers' code: a config that it cannot read makes no window either
        return Limit()
    kept = [
        int(layers[number].sliding_window)
        for number, window in windows.items()
        if window is None and number < len(layers) and getattr(layers[number], "is_sliding", False)
    ]
    if not kept:
        return Limit()
    return Limit(num_tokens=min(kept), reason="sees other tokens in transformers' cache")
