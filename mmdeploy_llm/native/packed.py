"""Weights in the layouts of the CPU kernels: panels of 64 rows, with four bytes of each row side by
side. Both classes are kernels.PackedWeight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .products import Products

PANEL = 64  # rows of a panel, as in gemm.h


class Bf16Weight:
    """A packed weight with its values unchanged."""

    def __init__(self, kernels: Products, weight: Tensor) -> None:
        """weight: [n, k] bf16, k even; its memory is reused."""
        self._kernels = kernels
        self._num_rows = weight.shape[0]
        self._panels = kernels.pack_bf16(weight.contiguous())  # [n / 64, k / 2, 64, 2]

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x [T, k] bf16 -> [T, n]."""
        return self._kernels.linear_bf16(x, self._panels, self._num_rows, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Looks up rows, [T] -> [T, k]."""
        panels = torch.div(indices, PANEL, rounding_mode="floor")
        return self._panels[panels, :, indices % PANEL].flatten(1)


class S8Weight:
    """A packed weight in int8 with a scale for each row; x is rounded to int8 too, with a scale for
    every 128 values of a row. Both are symmetric: the largest magnitude becomes 127."""

    rows = None  # the layout rounds them

    def __init__(self, kernels: Products, weight: Tensor) -> None:
        """weight: [n, k] float32 or bf16."""
        self._kernels = kernels
        rounded, self._scales = kernels.quantize_rows(weight.contiguous())
        self._panels = kernels.pack_s8(rounded)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]."""
        return self._kernels.linear_s8(x, self._panels, self._scales, bias)
