"""What backends and graphs make of a layout's lengths; base.py says what they are."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from .base import BatchLayout, StepLengths


def lengths_of(layout: BatchLayout) -> StepLengths:
    """The layout's lengths on its device, made from the host's lists where it brings none."""
    if layout.lengths is not None:
        return layout.lengths
    device = layout.slots.device
    starts = list(accumulate(layout.query_lens, initial=0))
    return StepLengths(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(layout.context_lens, dtype=torch.int32, device=device),
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
