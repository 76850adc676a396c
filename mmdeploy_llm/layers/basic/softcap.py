"""Softcap: bounds the logits of a model."""

from __future__ import annotations

from torch import Tensor

from .kernel_layer import KernelLayer


class Softcap(KernelLayer):
    """Computes cap * tanh(x / cap)."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """Returns the bounded values, perhaps in the memory of `x`."""
        return self.kernels.softcap(x, self.cap)
