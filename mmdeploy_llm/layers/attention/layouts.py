"""Computes what backends and CUDA graphs need from a BatchLayout."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.hooks.objects.attention import BatchLayout, StepLengths
from mmdeploy_llm.layers.transfer import to_device

Ints = NDArray[np.int64]


def lengths_of(layout: BatchLayout) -> StepLengths:
    """Returns the layout's lengths on its device, built from the host lists if it has none."""
    if layout.lengths is not None:
        return layout.lengths
    device = layout.slots.device
    starts = list(accumulate(layout.query_lens, initial=0))
    return StepLengths(
        query_starts=to_device(torch.tensor(starts, dtype=torch.int32), device),
        context_lens=to_device(torch.tensor(layout.context_lens, dtype=torch.int32), device),
        max_query=max(layout.query_lens),
        max_context=max(layout.context_lens),
    )


def decode_layout(
    *,
    block_tables: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    max_context: int,
    windows: tuple[Tensor, Tensor] | None = None,
) -> BatchLayout:
    """Builds the layout of a captured decode step of B sequences from tensors that keep their
    addresses: block tables [B, M] int32, slots [B] int64, context lengths [B] int32, at most
    max_context. windows: see BatchLayout."""
    num_seqs = slots.shape[0]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=slots.device)
    return BatchLayout(
        num_decode=num_seqs,
        query_lens=(),
        context_lens=(),
        block_tables=block_tables,
        slots=slots,
        lengths=StepLengths(
            query_starts=starts, context_lens=context_lens, max_query=1, max_context=max_context
        ),
        is_padded=True,
        windows=windows,
    )


def positions_of(layout: BatchLayout) -> tuple[Ints, Ints]:
    """Returns the first row of each sequence followed by T, [B + 1], and each token's index in its
    sequence, [T]."""
    starts = np.array([0, *accumulate(layout.query_lens)], dtype=np.int64)
    before = np.array(layout.context_lens) - np.array(layout.query_lens) - starts[:-1]
    counts = np.array(layout.query_lens)
    return starts, np.arange(starts[-1]) + np.repeat(before, counts)


def visible_ranges(
    layout: BatchLayout, starts: Ints, positions: Ints, window: int | None
) -> tuple[Ints, Ints]:
    """Returns the first visible key of each token and the end of its range, [T] each: the tokens
    before it within the window, itself, and all of its own media item where media are atomic."""
    ends = positions + 1
    first = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    for sequence, start, end in layout.spans:
        begin = starts[sequence]
        own = positions[begin : starts[sequence + 1]]
        rows = begin + np.flatnonzero((own >= start) & (own < end))
        first[rows] = np.minimum(first[rows], start)
        ends[rows] = end
    return first, ends
