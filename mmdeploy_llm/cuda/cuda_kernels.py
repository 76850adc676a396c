"""CudaKernels: implements kernels.Kernels with Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.kernels import PackedWeight, Quantization, Recording
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout

from . import codes, heads, rows
from . import experts as experts_module

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CudaKernels:
    """Launches kernels on the current CUDA stream without waiting for the device; see
    kernels.Kernels for the interface. They have one capability, `experts`: attention and sampling
    on CUDA are chosen in attention/ and sampling/."""

    samples_on_device = True
    memory = inputs = attention = activations = norms = states = draws = pixels = threads = None

    def __init__(self, device: torch.device) -> None:
        """device: where the tensors are; a CPU only with Triton's interpreter."""
        self._device, self._device_type = device, device.type
        self._compiled: set[tuple[object, ...]] = set()  # shapes for which experts are compiled

    @property
    def experts(self) -> CudaKernels:
        """Routing and experts."""
        return self

    def takes(self, *tensors: Tensor) -> bool:
        """Whether the kernels compute on tensors like these: on the device, of one supported dtype,
        the last axis contiguous."""
        dtype = tensors[0].dtype
        return dtype in DTYPES and all(
            x.device.type == self._device_type and x.dtype is dtype and x.stride(-1) == 1
            for x in tensors
        )

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """Returns norm(x) * weight for rows [T, size]. With a residual [T, size], adds x to it in
        place and norms the sum."""
        return rows.rms_norm(x, weight, eps, residual)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Returns silu(gate) * up, both [T, size]."""
        return rows.silu_mul(gate, up)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> None:
        """Rotates the first 2 R channels of every head of `x` [T, heads, D] in place. cosines,
        sines: [T, R] float32, contiguous."""
        rotary = QKRotary(cosines=cosines, sines=sines, is_interleaved=is_interleaved)
        heads.rotate(x, rotary, x.shape[1])

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
        """RMS-norms every head, the first num_q_heads with `q_weight` [D] and the others with
        `k_weight`, then rotates as `rotate`; in place."""
        rotary = QKRotary(
            cosines=cosines,
            sines=sines,
            is_interleaved=is_interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
        )
        heads.rotate(x, rotary, num_q_heads)

    def can_pack(self, weight: Tensor, quantization: Quantization | None) -> bool:
        """Returns False: products read weights as they are."""
        del weight, quantization
        return False

    def pack(self, weight: Tensor, quantization: Quantization | None) -> PackedWeight | None:
        """Returns None: products read weights as they are."""
        del weight, quantization
        return None

    def can_pack_coded(self, layout: CodeLayout, shape: Sequence[int]) -> bool:
        """Whether products read a weight [n, k] like this: codes are integers, and experts are
        fused in floats only."""
        if layout.is_float8 or len(shape) != 2:
            return False
        return codes.tile_size(layout.bits, layout.group_size, shape[-1]) is not None

    def pack_coded(self, weight: CodedWeight, *, rounds: bool) -> PackedWeight:
        """Brings a weight of few bits to the device. rounds: must be False."""
        assert not rounds, "activations stay as they are on a GPU"
        return codes.CudaCodes(weight, self._device)

    def record(
        self, function: Callable[..., Tensor], *inputs: Tensor
    ) -> tuple[Tensor, Recording | None]:
        """Returns function(*inputs) and None: launches are recorded in CUDA graphs, by the
        runner."""
        return function(*inputs), None

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        dtype: torch.dtype,
        norm_min: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts by logits [T, E]; see kernels.ExpertKernels."""
        return experts_module.route(logits, bias, top_k, dtype, norm_min)

    def run_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Computes the weighted sum of experts; see kernels.ExpertKernels. The first call for new
        shapes compiles every variant that later calls may need."""
        kind = x.dtype, x.stride(0), experts.shape[1], gate_up.shape, down.shape
        if kind not in self._compiled:
            self._compiled.add(kind)
            experts_module.compile_products(x, experts.shape[1], gate_up, down)
        return experts_module.run_experts(x, weights, experts, gate_up, down)
