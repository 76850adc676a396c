"""What a layer needs to be faster with kernels, on the CPU or on CUDA."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class LayerKernels(Protocol):
    """native.Kernels and cuda.CudaKernels. Methods check nothing that `takes` has answered."""

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels compute on tensors like these."""
        ...

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """norm(x) * weight of rows [T, size]; with a residual [T, size], which becomes
        residual + x, of that."""
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [T, size]."""
        ...

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Turns the first 2 R channels of every head of `x` [T, heads, D] in place. cosines, sines:
        [T, R] float32, contiguous."""
        ...

    def norm_and_rotate(
        self,
        x: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        num_q_heads: int,
        eps: float,
        cosines: Tensor,
        sines: Tensor,
        *,
        is_interleaved: bool,
    ) -> None:
        """As `rotate`, of the normed heads: the first ones with `q_weight` [D], the others with
        `k_weight`."""
        ...


class DeviceKernels(LayerKernels, Protocol):
    """cuda.CudaKernels: what pays where every operation is a launch and the host must not wait."""

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        dtype: torch.dtype,
        norm_min: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Of logits [T, E]: the weights [T, k], softmax over the experts, and the numbers [T, k] of
        the k largest of that plus the bias [E] float32. norm_min: the weights are divided by their
        sum, at least by this."""
        ...

    def run_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """[T, S], weights [T, k], expert numbers [T, k], gate_up [E, 2 I, S], down [E, S, I] ->
        [T, S]. Expert numbers from E on add nothing."""
        ...


class WithKernels(nn.Module):
    """A layer that is faster with kernels. kernels: set by `use_kernels`, None before; they are in
    device_kernels too where they are such."""

    kernels: LayerKernels | None = None
    device_kernels: DeviceKernels | None = None
