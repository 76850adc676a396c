"""The calls of torch's attention for one step: sequences whose contexts are gathered together.
Shapes are those of reference.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decode sequences whose contexts are gathered together. rows: [B], their rows of the step.
    tables: [B, M], their blocks. mask: [B, 1, 1, L], the visible keys.
    first: [B, 1], the index of the first key."""

    rows: Tensor
    tables: Tensor
    mask: Tensor
    first: Tensor
    length: int

    def biases(self, alibi: Alibi, num_kv_heads: int) -> Tensor:
        """Returns the biases of the keys, [B, K, G, L]."""
        own = alibi.biases(self.first + torch.arange(self.length, device=self.first.device))
        return own.view(num_kv_heads, -1, *own.shape[1:]).permute(2, 0, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One prefill chunk, rows start .. end of the step. is_own: the first chunk of its sequence,
    which is its own context. mask: [n, L]; None when attention is causal over its own tokens.
    first: the index of the first key."""

    start: int
    end: int
    length: int
    table: Tensor
    mask: Tensor | None
    is_own: bool
    first: int

    def biases(self, alibi: Alibi, num_kv_heads: int) -> Tensor:
        """Returns the biases of the keys, [K, G, 1, L]."""
        own = alibi.biases(self.first + torch.arange(self.length, device=self.table.device))
        return own.view(num_kv_heads, -1, 1, self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of torch's attention for one step, for layers of one window."""

    groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
