"""Linear layers without initialisation: weights come from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter whose values come from a checkpoint."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Linear(nn.Module):
    """x [..., in_size] -> [..., out_size]. weight [out_size, in_size], bias [out_size] or None."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_parameter(out_size, in_size)
        self.bias = empty_parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """One matrix product, bias included."""
        return F.linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear layers of the same input as one: their outputs lie side by side.

    parts: the checkpoint's name of each layer and the rows of `weight` and `bias` that are its own;
    weights.map reads it.
    """

    def __init__(self, in_size: int, part_sizes: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_size, sum(part_sizes.values()), bias=bias)
        ends = accumulate(part_sizes.values())
        self.parts = {
            name: slice(end - size, end)
            for (name, size), end in zip(part_sizes.items(), ends, strict=True)
        }
