"""The calls of torch's attention for one step: sequences whose contexts are gathered together.
Shapes are those of reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi
from mmdeploy_llm.hooks.objects.attention import BatchLayout


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


class Slots:
    """Finds where the last tokens of sequences are, once in a step for each choice of sequences."""

    def __init__(self, layout: BatchLayout, block_size: int) -> None:
        self._layout, self._block_size = layout, block_size
        self._found: dict[tuple[int | None, ...], Tensor] = {}

    def of(self, sequences: Sequence[int], num_kept: int | None) -> Tensor:
        """Returns the slots [B, L] of the last tokens of sequences that get one token each, that
        one included, of all or of num_kept before it. Shorter ones begin with the slot of the new
        token, which holds finite values."""
        key = (*sequences, num_kept)
        if key not in self._found:
            self._found[key] = _slots_of(self._layout, self._block_size, sequences, num_kept)
        return self._found[key]


def _slots_of(
    layout: BatchLayout, block_size: int, sequences: Sequence[int], num_kept: int | None
) -> Tensor:
    device = layout.slots.device
    lens = torch.tensor([layout.context_lens[number] for number in sequences], device=device)
    counts = lens if num_kept is None else lens.clamp(max=num_kept + 1)
    places = torch.arange(int(counts.max()), device=device) - counts.max() + lens[:, None]
    places = torch.where(places < (lens - counts)[:, None], lens[:, None] - 1, places)
    blocks = layout.block_tables[list(sequences)].long().gather(1, places // block_size)
    return blocks * block_size + places % block_size


def stored(new: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """Writes keys or values [B, K, D] to the last of their slots [B, L] of a cache [N, P, K, D].
    Returns what all of these slots hold, [B, L, K, D], in the dtype of `new`."""
    rows = cache.flatten(0, 1)
    rows.index_copy_(0, slots[:, -1], new.to(cache.dtype))
    kept = rows.index_select(0, slots.flatten()).to(new.dtype)
    return kept.view(*slots.shape, *kept.shape[1:])
