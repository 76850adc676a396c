"""CudaKernels: what layers ask of kernels on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdeploy_llm.forward import HeadTurn

from . import experts as experts_module
from . import heads, rows

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CudaKernels:
    """Launches the kernels on the current CUDA stream; nothing here waits for the device.

    Methods check nothing that `takes` has answered.
    """

    def __init__(self, device: torch.device) -> None:
        """device: where the tensors are; a CPU with Triton's interpreter only."""
        self._device_type = device.type
        self._compiled: set[tuple[object, ...]] = set()  # kinds of experts

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels compute on tensors like these: on the device, of one dtype, with
        channels side by side."""
        dtype = tensors[0].dtype
        return dtype in DTYPES and all(
            x.device.type == self._device_type and x.dtype is dtype and x.stride(-1) == 1
            for x in tensors
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """norm(x) * weight of rows [T, size]; with a residual [T, size], which becomes
        residual + x, of that."""
        return rows.rms_norm(x, weight, eps, residual)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, both [T, size]."""
        return rows.silu_mul(gate, up)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Turns the first 2 R channels of every head of `x` [T, heads, D] in place. cosines, sines:
        [T, R] float32, contiguous."""
        turn = HeadTurn(cosines=cosines, sines=sines, is_interleaved=is_interleaved)
        heads.rotate(x, turn, x.shape[1])

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
        turn = HeadTurn(
            cosines=cosines,
            sines=sines,
            is_interleaved=is_interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
        )
        heads.rotate(x, turn, num_q_heads)

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
        return experts_module.route(logits, bias, top_k, dtype, norm_min)

    def run_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """[T, S], weights [T, k], expert numbers [T, k], gate_up [E, 2 I, S], down [E, S, I] ->
        [T, S]. Expert numbers from E on add nothing. The first call compiles all it may need."""
        kind = x.dtype, x.stride(0), experts.shape[1], gate_up.shape, down.shape
        if kind not in self._compiled:
            self._compiled.add(kind)
            experts_module.compile_products(x, experts.shape[1], gate_up, down)
        return experts_module.run_experts(x, weights, experts, gate_up, down)
