"""Weights in the layouts of the CPU kernels: panels of 64 rows, four bytes of each side by side."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from mmdeploy_llm.native import PANEL, Kernels

Quantization = Literal["int8"]


class PackedWeight(Protocol):
    """A weight [n, k] in a layout of the kernels."""

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, k] -> [T, n]."""
        ...


def pack_weight(
    weight: Tensor, kernels: Kernels, quantization: Quantization | None
) -> PackedWeight | None:
    """`weight` [n, k] laid out, rounded to int8 where asked; None when the kernels do not take it.
    In bf16 its memory is used on."""
    if not can_pack(weight, kernels, quantization):
        return None
    return S8Weight(kernels, weight) if quantization else Bf16Weight(kernels, weight)


def can_pack(weight: Tensor, kernels: Kernels, quantization: Quantization | None) -> bool:
    """Whether the kernels take a weight [..., n, k] like this."""
    is_even_bf16 = weight.dtype is torch.bfloat16 and weight.shape[-1] % 2 == 0
    return kernels.takes(weight) and (quantization is not None or is_even_bf16)


class Bf16Weight:
    """The same values, for any number of rows of x."""

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        """weight: [n, k] bf16, k even; its memory is used on."""
        self._kernels = kernels
        self._num_rows = weight.shape[0]
        self._panels = kernels.pack_bf16(weight.contiguous())  # [n / 64, k / 2, 64, 2]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, k] bf16 -> [T, n]."""
        return self._kernels.linear_bf16(x, self._panels, self._num_rows, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """[T] -> [T, k]."""
        panels = torch.div(indices, PANEL, rounding_mode="floor")
        return self._panels[panels, :, indices % PANEL].flatten(1)


class S8Weight:
    """int8 with a scale for each row; x is rounded to int8 too, with a scale for every 128 values
    of its rows. Both are symmetric, the largest value becoming 127.
    """

    def __init__(self, kernels: Kernels, weight: Tensor) -> None:
        """weight: [n, k] float32 or bf16."""
        self._kernels = kernels
        rounded, self._scales = kernels.quantize_rows(weight.contiguous())
        self._panels = kernels.pack_s8(rounded)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, k] -> [T, n]."""
        return self._kernels.linear_s8(x, self._panels, self._scales, bias)
