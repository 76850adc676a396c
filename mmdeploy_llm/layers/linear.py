"""Linear layers without initialisation: weights come from a checkpoint, and may be laid out anew
for the CPU kernels once they are there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.native import Kernels

from .packed import Bf16Weight, PackedWeight, Quantization, pack_weight


def empty_parameter(*shape: int) -> nn.Parameter:
    """A parameter whose values come from a checkpoint."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def emptied(weight: Tensor) -> nn.Parameter:
    """What is left of a packed weight [..., n, k]: [..., 0, k] of the same dtype and device."""
    *outer, _, k = weight.shape
    return nn.Parameter(weight.new_empty(*outer, 0, k), requires_grad=False)


class Matrix(nn.Module):
    """A weight [n, k] to multiply with. Packed, `weight` is empty, [0, k], of the same dtype."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight = empty_parameter(n, k)
        self.packed: PackedWeight | None = None

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] -> [..., n]."""
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        return self.packed.product(flat, bias).view(*x.shape[:-1], -1)

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """Lays the weight out for `kernels`, rounded to int8 where asked; what they do not take
        stays as it is."""
        self.packed = pack_weight(self.weight.detach(), kernels, quantization)
        if self.packed is not None:
            self.weight = emptied(self.weight)


class Linear(Matrix):
    """x [..., in_size] -> [..., out_size]. weight [out_size, in_size], bias [out_size] or None."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False) -> None:
        super().__init__(out_size, in_size)
        self.bias = empty_parameter(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """One matrix product, bias included."""
        return self.product(x, self.bias)


class Embedding(Matrix):
    """A row of `weight` [vocab, hidden] per token; as the output head of a model, a product too."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]."""
        if isinstance(self.packed, Bf16Weight):
            return self.packed.rows(token_ids)
        return F.embedding(token_ids, self.weight)

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """As Matrix.pack; rows are looked up exactly, so int8 keeps the weight beside it."""
        weight = self.weight
        super().pack(kernels, quantization)
        if not isinstance(self.packed, Bf16Weight):
            self.weight = weight


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
