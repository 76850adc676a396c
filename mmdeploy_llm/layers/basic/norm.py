"""RMSNorm, alone or fused with the residual addition before it; LayerNorm."""

from __future__ import annotations

from torch import Tensor, nn

from .kernel_layer import KernelLayer
from .linear import empty_parameter


class RMSNorm(KernelLayer):
    """Computes x / sqrt(mean(x ** 2) + eps) * weight over the last axis: statistics in float32,
    cast to x's dtype, then times weight. On the CPU plain torch is bit-equal to transformers.

    Compiled kernels round as plain torch does. Without them CUDA uses torch's fused kernel, which
    rounds once less in bf16: it applies the weight before the cast. centre: what is added to the
    weight, with one cast after the product; None: nothing, and the cast comes before it.
    """

    centre: float | None = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns norm(x), of the shape and dtype of `x`."""
        return self.kernels.rms_norm(x, self.weight, self.eps, None, self.centre)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (norm(x + residual), x + residual), the sum in the memory of `residual`. Without
        a residual `x` becomes it, and must not be written to afterwards."""
        if residual is None:
            return self(x), x
        if not self.kernels.is_compiled:  # so that a hook of this module sees it
            return self(residual.add_(x)), residual
        return self.kernels.rms_norm(x, self.weight, self.eps, residual, self.centre), residual

    def add_to(self, stream: Tensor, x: Tensor, factor: Tensor | None = None) -> Tensor:
        """Returns (stream + norm(x)) * factor, all [T, size], in the memory of `stream`. factor:
        [1]; None: 1."""
        return self.kernels.add_norm(x, self.weight, self.eps, stream, factor, self.centre)

    def of_heads(self, x: Tensor) -> Tensor:
        """Returns every head of x [T, heads, size] normed, perhaps in the memory of `x`, of which
        only the channels of a head need be contiguous."""
        return self.kernels.norm_heads(x, self.weight, self.eps, self.centre)


class ZeroCenteredRMSNorm(RMSNorm):
    """Computes x / sqrt(mean(x ** 2) + eps) * (1 + weight) over the last axis in float32, and casts
    only the product to x's dtype."""

    centre = 1.0


class LateRMSNorm(ZeroCenteredRMSNorm):
    """Multiplies by weight alone, and casts only the product, once less than RMSNorm."""

    centre = 0.0


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
        own = self.weight, self.bias, self.eps
        return self.kernels.layer_norm(x, *own, is_centred=self.is_centred)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See RMSNorm."""
        if residual is None:
            return self(x), x
        if not self.kernels.is_compiled:  # so that a hook of this module sees it
            return self(residual.add_(x)), residual
        own = self.weight, self.bias, self.eps, residual
        return self.kernels.layer_norm(x, *own, is_centred=self.is_centred), residual


class NoNorm(KernelLayer):
    """Stands where a model has no norm: adds to the residual stream, and returns it as it is."""

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the sum twice, in the same memory; see RMSNorm."""
        total = x if residual is None else self.kernels.add_rows(residual, x)
        return total, total
