"""What backends and graphs make of a layout's lengths; base.py says what they are."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.transfer import to_device

from .base import BatchLayout, StepLengths

Ints = NDArray[np.int64]


def lengths_of(layout: BatchLayout) -> StepLengths:
    """The layout's lengths on its device, made from the host's lists where it brings none."""
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
    *, block_tables: Tensor, slots: Tensor, context_lens: Tensor, max_context: int
) -> BatchLayout:
    """The layout of a captured decode step of B sequences, of tensors that keep their place: block
    tables [B, M] int32, slots [B] int64, context lengths [B] int32, none over max_context."""
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
    )


def places_of(layout: BatchLayout) -> tuple[Ints, Ints]:
    """[B + 1], the first row of each sequence, and T; [T], each token's place in its sequence."""
    starts = np.array([0, *accumulate(layout.query_lens)], dtype=np.int64)
    before = np.array(layout.context_lens) - np.array(layout.query_lens) - starts[:-1]
    counts = np.array(layout.query_lens)
    return starts, np.arange(starts[-1]) + np.repeat(before, counts)


def visible_ranges(
    layout: BatchLayout, starts: Ints, places: Ints, window: int | None
) -> tuple[Ints, Ints]:
    """[T] each: a token sees the keys first .. behind of its sequence, whatever the reason: causal
    attention and windows, and the whole of its own media item where media are atomic."""
    behind = places + 1
    first = np.zeros_like(behind) if window is None else np.maximum(behind - window, 0)
    for sequence, start, end in layout.spans:
        begin = starts[sequence]
        own = places[begin : starts[sequence + 1]]
        rows = begin + np.flatnonzero((own >= start) & (own < end))
        first[rows] = np.minimum(first[rows], start)
        behind[rows] = end
    return first, behind
