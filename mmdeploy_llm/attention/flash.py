"""flash-attn 2 on CUDA: one varlen call for prefill chunks and decode tokens together, and one more
for the tokens of atomic media in the step, which also see what follows them in their item."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError

from .base import BatchLayout, KVCache

BLOCK_MULTIPLE = 256  # flash-attn 2 reads paged caches in blocks of a multiple of 256 tokens


class FlashAttention:
    """`flash_attn_varlen_func` over the block tables. Raises ConfigError when flash-attn is not
    installed."""

    name = "flash-attn"
    can_capture = False

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What one varlen call attends to: R query tokens of B sequences. rows: [R] of the step's
    tokens; None: all of them."""

    query_starts: Tensor
    key_starts: Tensor
    max_query: int
    max_context: int
    tables: Tensor
    is_causal: bool = True
    rows: Tensor | None = None


class FlashContext:
    """Attention of one step."""

    def __init__(self, varlen: Callable[..., Any], layout: BatchLayout, cache: KVCache) -> None:
        self._varlen = varlen
        self._cache = cache
        self._slots = layout.slots
        self._tokens = _call(layout.query_lens, layout.context_lens, layout.block_tables)
        self._spans = _span_call(layout) if layout.spans else None
        self._longest_span = max((end - start for _, start, end in layout.spans), default=0)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`q` [T, H, D], `k` and `v` [T, K, D] -> [T, H, D]; see forward.AttentionContext.

        Raises ModelNotSupportedError for an atomic media item that is longer than the window.
        """
        if window is not None and self._longest_span > window:
            raise ModelNotSupportedError(
                f"a media item of {self._longest_span} tokens is longer than the attention window "
                f"of layer {layer}, {window} tokens, which flash-attn cannot compute; use "
                "attention_backend='reference'"
            )
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, k.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self._slots, v.to(values.dtype))
        left = -1 if window is None else window - 1
        options = {"softmax_scale": scale, "softcap": softcap or 0.0}
        out = self._attend(self._tokens, q, keys, values, (left, 0 if window else -1), options)
        if self._spans is not None:
            rows = self._spans.rows
            span_out = self._attend(self._spans, q[rows], keys, values, (left, -1), options)
            out[rows] = span_out
        return out

    def _attend(
        self,
        call: _Call,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        window: tuple[int, int],
        options: Mapping[str, float | None],
    ) -> Tensor:
        out: Tensor = self._varlen(
            q,
            keys,
            values,
            cu_seqlens_q=call.query_starts,
            cu_seqlens_k=call.key_starts,
            max_seqlen_q=call.max_query,
            max_seqlen_k=call.max_context,
            causal=call.is_causal,
            window_size=window,
            block_table=call.tables,
            **options,
        )
        return out


def _call(
    query_lens: tuple[int, ...],
    context_lens: tuple[int, ...],
    tables: Tensor,
    *,
    rows: Tensor | None = None,
) -> _Call:
    """rows: those of a call over spans, in which every token sees the whole context."""
    return _Call(
        query_starts=_starts(query_lens, tables.device),
        key_starts=_starts(context_lens, tables.device),
        max_query=max(query_lens),
        max_context=max(context_lens),
        tables=tables,
        is_causal=rows is None,
        rows=rows,
    )


def _span_call(layout: BatchLayout) -> _Call:
    """The tokens of each span as a sequence that ends where the span ends: seen from its last
    token back, that is all they may see."""
    query_lens, context_lens, rows, sequences = [], [], [], []
    first_rows = [0, *accumulate(layout.query_lens)]
    for sequence, start, end in layout.spans:
        first = layout.context_lens[sequence] - layout.query_lens[sequence]
        begin = max(start, first)
        row = first_rows[sequence] + begin - first
        rows.append(torch.arange(row, row + end - begin))
        query_lens.append(end - begin)
        context_lens.append(end)
        sequences.append(sequence)
    device = layout.slots.device
    tables = layout.block_tables[torch.tensor(sequences, device=device)]
    return _call(tuple(query_lens), tuple(context_lens), tables, rows=torch.cat(rows).to(device))


def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[B + 1] int32: where each sequence begins, and the end."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
