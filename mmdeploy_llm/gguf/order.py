"""The orders of rows and columns that llama.cpp's converter makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Rows (or columns) in groups of first * second * size, where the converter swapped the two
    outer axes: [first, second, size] became [second, first, size].

    offset: rows before the groups, which stayed in their places. rest: such rows after each group.
    """

    first: int
    second: int
    size: int = 1
    offset: int = 0
    rest: int = 0

    @property
    def group(self) -> int:
        """Rows of a group, with those that stayed."""
        return self.first * self.second * self.size + self.rest

    def places(self, start: int, end: int) -> Tensor:
        """Returns where rows start .. end are stored, int64 [end - start]."""
        row = torch.arange(start, end)
        base = row - self.offset
        within = base % self.group
        rest = within % self.size
        outer = within // (self.second * self.size)
        inner = within // self.size % self.second
        moved = base - within + (inner * self.first + outer) * self.size + rest + self.offset
        return torch.where((base < 0) | (within >= self.group - self.rest), row, moved)


def halves_to_pairs(num_rows: int, num_heads: int) -> Order:
    """Returns the order of queries and keys of Llama: the halves of a head that transformers
    rotates became the pairs that llama.cpp rotates."""
    return Order(first=2, second=num_rows // num_heads // 2)


def pairs_to_halves(head_dim: int, rotary_dim: int) -> Order:
    """Returns the order of queries and keys of GLM-4V: the adjacent channels that transformers
    rotates became the halves that llama.cpp rotates. The channels after them stayed."""
    return Order(first=rotary_dim // 2, second=2, rest=head_dim - rotary_dim)


def tiled_heads(num_keys: int, num_values: int, size: int = 1, offset: int = 0) -> Order:
    """Returns the order of the value heads of Qwen3.5: those of one key head lay side by side and
    became one of each key head in turn. size: rows of a value head."""
    return Order(first=num_keys, second=num_values // num_keys, size=size, offset=offset)
