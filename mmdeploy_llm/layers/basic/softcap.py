"""Softcap: bounds the logits of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from .kernel_layer import KernelLayer, activation_kernels


class Softcap(KernelLayer):
    """Computes cap * tanh(x / cap). In bf16 with kernels each value is looked up in a table that
    torch has computed: over a large vocabulary the three operations take longer than its largest
    value is found."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap
        self._table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the bounded values, perhaps in the memory of `x`."""
        own = activation_kernels(self.kernels, x)
        if own is None or x.dtype is not torch.bfloat16 or not x.is_contiguous():
            return self._capped(x)
        if self._table is None:
            bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
            self._table = self._capped(bits.view(torch.bfloat16))
        return own.map_values(x, self._table)

    def _capped(self, x: Tensor) -> Tensor:
        return torch.tanh(x / self.cap).mul_(self.cap)
