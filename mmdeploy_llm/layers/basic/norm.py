"""RMSNorm, alone or fused with the residual addition before it; LayerNorm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.kernels.states import NormKernels

from .kernel_layer import KernelLayer, added, row_chunks
from .linear import empty_parameter

# Values in a float32 temporary; see row_chunks.
MAX_VALUES = 2**18


class RMSNorm(KernelLayer):
    """Computes x / sqrt(mean(x ** 2) + eps) * weight over the last axis: statistics in float32,
    cast to x's dtype, then times weight. On the CPU plain torch is bit-equal to transformers.

    Kernels round as plain torch does. Without kernels CUDA uses torch's fused kernel, which rounds
    once less in bf16: it applies the weight before the cast. centre: what is added to the weight,
    with one cast after the product; None: nothing, and the cast comes before it.
    """

    centre: float | None = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns norm(x), of the shape and dtype of `x`."""
        if self.kernels is not None and x.is_contiguous() and self.kernels.takes(x, self.weight):
            flat = x.view(-1, x.shape[-1])
            return self.kernels.rms_norm(flat, self.weight, self.eps).view(x.shape)
        if x.is_cuda:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        chunks = row_chunks(x, math.prod(x.shape[1:]), MAX_VALUES)
        if len(chunks) == 1:
            return _rms_norm(x, self.weight, self.eps)
        out = torch.empty_like(x)
        for rows in chunks:
            out[rows] = _rms_norm(x[rows], self.weight, self.eps)
        return out

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual), the sum in the memory of `residual`. Without
        a residual `x` becomes it, and must not be written to afterwards."""
        if residual is None:
            return self(x), x
        if self._can_join(x, residual):
            assert self.kernels is not None
            return self.kernels.rms_norm(x, self.weight, self.eps, residual), residual
        residual.add_(x)
        return self(residual), residual

    def add_to(self, stream: Tensor, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """Returns (stream + norm(x)) * factor, all [T, size], in the memory of `stream`. factor:
        [1]; None: 1."""
        own = self.kernels
        tensors = [each for each in (x, self.weight, factor) if each is not None]
        is_ours = own is not None and own.takes(stream, *tensors)
        if own is not None and own.norms is not None and is_ours and stream.is_contiguous():
            own.norms.add_norm(x, self.weight, self.eps, stream, factor, self.centre)
            return stream
        stream.add_(self(x))
        return stream if factor is None else stream.mul_(factor)

    def _can_join(self, x: Tensor, residual: Tensor) -> bool:
        """Whether one kernel does both the addition and the norm."""
        if self.kernels is None or x.dim() != 2 or not residual.is_contiguous():
            return False
        return self.kernels.takes(x, residual, self.weight)


class ZeroCenteredRMSNorm(RMSNorm):
    """Computes x / sqrt(mean(x ** 2) + eps) * (1 + weight) over the last axis in float32, and casts
    only the product to x's dtype."""

    centre: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns norm(x), of the shape and dtype of `x`."""
        kernels = self._norms(x)
        if kernels is not None and x.is_contiguous():
            flat, own = x.view(-1, x.shape[-1]), (self.weight, self.eps)
            return kernels.centred_norm(flat, *own, centre=self.centre).view(x.shape)
        if x.is_cuda and self.centre == 0:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale * (self.centre + self.weight.float())).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See RMSNorm."""
        if residual is None:
            return self(x), x
        kernels = self._norms(x)
        if kernels is not None and self._can_join(x, residual):
            own = self.weight, self.eps, residual, self.centre
            return kernels.centred_norm(x, *own), residual
        residual.add_(x)
        return self(residual), residual

    def _norms(self, x: Tensor) -> NormKernels | None:
        if self.kernels is None or not self.kernels.takes(x, self.weight):
            return None
        return self.kernels.norms


class LateRMSNorm(ZeroCenteredRMSNorm):
    """Multiplies by weight alone, and casts only the product, once less than RMSNorm."""

    centre = 0.0


def heads_normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """Returns every head of x [T, heads, size] normed, with kernels in the memory of `x`, of which
    only the channels of a head need be contiguous."""
    own = norm.kernels
    if own is None or own.norms is None or not own.takes(x, norm.weight):
        out: Tensor = norm(x.contiguous())
        return out
    own.norms.norm_heads(x, norm.weight, norm.eps, norm.centre)
    return x


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the formula in plain torch, without writing to `x`."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    normed = wide * scale if wide is x else wide.mul_(scale).to(x.dtype)
    return normed.mul_(weight)


class LayerNorm(KernelLayer):
    """Computes torch's layer_norm with the weight and bias that the model has; statistics in
    float32. is_centred: whether it multiplies by 1 + weight."""

    weight: nn.Parameter | None

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        has_bias: bool = True,
        has_weight: bool = True,
        is_centred: bool = False,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(size) if has_weight else None
        self.bias = empty_parameter(size) if has_bias else None
        self.eps = eps
        self.is_centred = is_centred

    def forward(self, x: Tensor) -> Tensor:
        """Returns norm(x), of the shape and dtype of `x`."""
        weight: Tensor | None = self.weight
        norms = self._norms(x)
        if norms is not None and x.is_contiguous():
            flat = x.view(-1, x.shape[-1])
            own = weight, self.bias, self.eps
            return norms.layer_norm(flat, *own, is_centred=self.is_centred).view(x.shape)
        if self.is_centred and weight is not None:
            weight = weight + 1
        return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See RMSNorm."""
        if residual is None:
            return self(x), x
        norms = self._norms(x, residual)
        if norms is not None and x.dim() == 2 and residual.is_contiguous():
            own = self.weight, self.bias, self.eps, residual
            return norms.layer_norm(x, *own, is_centred=self.is_centred), residual
        residual.add_(x)
        return self(residual), residual

    def _norms(self, *tensors: Tensor) -> NormKernels | None:
        own = [each for each in (self.weight, self.bias) if each is not None]
        if self.kernels is None or not self.kernels.takes(*tensors, *own):
            return None
        return self.kernels.norms


class NoNorm(KernelLayer):
    """Stands where a model has no norm: adds to the residual stream, and returns it as it is."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the sum twice, in the same memory; see RMSNorm."""
        total = x if residual is None else added(residual, x, self.kernels)
        return total, total
