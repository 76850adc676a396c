"""flash-attn 2 on CUDA: one varlen call for prefill chunks and decode tokens together."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ConfigError

from .base import BatchLayout, KVCache

BLOCK_MULTIPLE = 256  # flash-attn 2 reads paged caches in blocks of a multiple of 256 tokens


class FlashAttention:
    """`flash_attn_varlen_func` over the block tables. Raises ConfigError when flash-attn is not
    installed."""

    name = "flash-attn"

    def __init__(self) -> None:
        try:
            module = importlib.import_module("flash_attn")
        except ImportError as error:
            raise ConfigError(
                "attention_backend = 'flash-attn', but flash-attn cannot be imported "
                f"({error}); pip install mmdeploy-llm[cuda], or use 'reference'"
            ) from error
        self._varlen: Callable[..., Any] = module.flash_attn_varlen_func

    def begin(self, layout: BatchLayout, cache: KVCache) -> FlashContext:
        """Cumulative lengths of the step, shared by all layers."""
        assert cache.block_size % BLOCK_MULTIPLE == 0, "select sees to it"
        return FlashContext(self._varlen, layout, cache)


class FlashContext:
    """Attention of one step."""

    def __init__(self, varlen: Callable[..., Any], layout: BatchLayout, cache: KVCache) -> None:
        self._varlen = varlen
        self._cache = cache
        self._slots = layout.slots
        self._tables = layout.block_tables
        device = layout.slots.device
        self._query_starts = _starts(layout.query_lens, device)
        self._key_starts = _starts(layout.context_lens, device)
        self._max_query = max(layout.query_lens)
        self._max_context = max(layout.context_lens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q` [T, H, D], `k` and `v` [T, K, D] -> [T, H, D]; see forward.AttentionContext."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, k.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self._slots, v.to(values.dtype))
        out: Tensor = self._varlen(
            q,
            keys,
            values,
            cu_seqlens_q=self._query_starts,
            cu_seqlens_k=self._key_starts,
            max_seqlen_q=self._max_query,
            max_seqlen_k=self._max_context,
            causal=True,
            block_table=self._tables,
        )
        return out


def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[B + 1] int32: where each sequence begins, and the end."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
