"""The orders of rows and columns that llama.cpp's converter makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError

from .header import StoredTensor
from .metadata import Metadata


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


# The order in one tensor of a model, None where the converter kept it. Raises CheckpointError where
# the sizes that the metadata state do not fit the tensor.
OrderOf: TypeAlias = Callable[[Metadata, StoredTensor], Order | None]


def halves_to_pairs(key: str) -> OrderOf:
    """Returns the order of heads whose halves transformers rotates, and which became the pairs that
    llama.cpp rotates. key: of the metadata, for the number of heads."""

    def order(metadata: Metadata, tensor: StoredTensor) -> Order:
        heads = metadata.most(key, metadata.whole("attention.head_count"))
        num_rows = tensor.shape[0]
        if num_rows % (2 * heads):
            raise CheckpointError(
                f"{tensor.name} of {metadata.header.paths[0]} has {num_rows} rows, which are not "
                f"{heads} heads of an even size"
            )
        return Order(first=2, second=num_rows // heads // 2)

    return order
