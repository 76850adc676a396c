"""RMSNorm, alone and joined with the residual addition before it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import empty_parameter
from .rows import row_parts
from .with_kernels import WithKernels

# Values of a float32 temporary, see rows.py.
MAX_VALUES = 2**18


class RMSNorm(WithKernels):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis: statistics in float32, cast to x's
    dtype, then times weight, as transformers does; in plain torch bit-equal to it on the CPU.

    Kernels round as plain torch does. On CUDA without them torch's fused kernel is used, the same
    but for one rounding less in bf16 (the weight is applied before the cast).
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        if self.kernels is not None and x.is_contiguous() and self.kernels.takes(x, self.weight):
            flat = x.view(-1, x.shape[-1])
            return self.kernels.rms_norm(flat, self.weight, self.eps).view(x.shape)
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        rows = row_parts(x, math.prod(x.shape[1:]), MAX_VALUES)
        if len(rows) == 1:
            return _rms_norm(x, self.weight, self.eps)
        out = torch.empty_like(x)
        for part in rows:
            out[part] = _rms_norm(x[part], self.weight, self.eps)
        return out

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Writes into `residual`; without one, `x` starts it
        and must not be written to afterwards."""
        if residual is None:
            return self(x), x
        if self._can_join(x, residual):
            assert self.kernels is not None
            return self.kernels.rms_norm(x, self.weight, self.eps, residual), residual
        residual.add_(x)
        return self(residual), residual

    def _can_join(self, x: Tensor, residual: Tensor) -> bool:
        """Whether one kernel adds and norms."""
        if self.kernels is None or x.dim() != 2 or not residual.is_contiguous():
            return False
        return self.kernels.takes(x, residual, self.weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The plain formula; `x` is left as it is."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * scale if wide is x else wide.mul_(scale).to(x.dtype)
    return normed.mul_(weight)


class LayerNorm(nn.Module):
    """torch's layer_norm with weight and bias, statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
