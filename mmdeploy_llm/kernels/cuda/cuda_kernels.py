"""CudaKernels: overrides kernels.Kernels with Triton."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.kernels.base import Kernels, PackedWeight, Quantization
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout, layout_of
from mmdeploy_llm.kernels.mixtures import RouteRule
from mmdeploy_llm.values.options.weight_formats import rounds_inputs

from . import codes, heads, int8, low_rank, rows
from . import experts as experts_module

if TYPE_CHECKING:
    from mmdeploy_llm.kernels.cpu import CpuKernels

ROUNDED = (torch.bfloat16, torch.float32)  # dtypes of weights that are rounded
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CudaKernels(Kernels):
    """Launches kernels on the current CUDA stream without waiting for the device; see
    kernels.Kernels for what each computes. Attention and sampling on CUDA are chosen in
    layers/attention/ and engine/runner/sampling/."""

    is_compiled = samples_on_device = True

    def __init__(self, device: torch.device, rounder: CpuKernels | None = None) -> None:
        """device: where the tensors are; a CPU only with Triton's interpreter. rounder: rounds
        weights on the host; None: `pack` leaves them as they are."""
        self._rounder = rounder
        self._device, self._device_type = device, device.type
        self._compiled: set[tuple[object, ...]] = set()  # shapes for which experts are compiled

    def low_rank_table(
        self, num_slots: int, starts: Sequence[int], k: int, dtype: torch.dtype
    ) -> low_rank.Table:
        return low_rank.Table(num_slots, starts, k, dtype, self._device)

    def takes(self, *tensors: Tensor | None) -> bool:
        dtype = None if tensors[0] is None else tensors[0].dtype
        return dtype in DTYPES and all(
            x is None
            or (x.device.type == self._device_type and x.dtype is dtype and x.stride(-1) == 1)
            for x in tensors
        )

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        centre: float | None = None,
    ) -> Tensor:
        if centre is not None or not self.takes_rows(x, residual, weight):
            return super().rms_norm(x, weight, eps, residual, centre)
        return rows.rms_norm(x.view(-1, x.shape[-1]), weight, eps, residual).view(x.shape)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        if gate.dim() != 2 or not self.takes(gate, up):
            return super().silu_mul(gate, up)
        return rows.silu_mul(gate, up)

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, *, is_interleaved: bool) -> Tensor:
        if not self.takes(x):
            return super().rotate(x, cosines, sines, is_interleaved=is_interleaved)
        rotary = QKRotary(cosines=cosines, sines=sines, is_interleaved=is_interleaved)
        heads.rotate(x, rotary, x.shape[1])
        return x

    def norm_and_rotate(
        self, x: Tensor, num_q_heads: int, rotary: QKRotary, centre: float | None = None
    ) -> Tensor:
        if centre is not None or not self.takes(x, rotary.q_weight, rotary.k_weight):
            return super().norm_and_rotate(x, num_q_heads, rotary, centre)
        heads.rotate(x, rotary, num_q_heads)
        return x

    def can_pack(self, weight: Tensor, quantization: Quantization | None) -> bool:
        """Whether `pack` rounds a weight: unrounded, products read it as it is, and experts are
        fused in floats only."""
        if quantization is None or self._rounder is None:
            return False
        own = self._rounder.formats[quantization]
        layout = layout_of(own, weight.shape[-1])
        can_multiply = own.group_size is None or self.can_pack_coded(layout, weight.shape)
        return weight.dim() == 2 and weight.dtype in ROUNDED and can_multiply

    def pack(self, weight: Tensor, quantization: Quantization | None) -> PackedWeight | None:
        """Rounds `weight` [n, k] on the host and brings its codes to the device; None where
        `can_pack` is False. Only formats without groups have products with rounded x: see
        pack_coded."""
        if quantization is None or self._rounder is None or not self.can_pack(weight, quantization):
            return None
        weight = weight.cpu().contiguous()
        own = self._rounder.formats[quantization]
        if own.group_size is None:
            values, (scales, shifts) = self._rounder.quantize_rows(weight)
            return int8.Int8Rows(values, scales, shifts, self._device)
        coded = self._rounder.rounded(weight, own)
        return self.pack_coded(coded, rounds=rounds_inputs(quantization))

    def can_pack_coded(self, layout: CodeLayout, shape: Sequence[int]) -> bool:
        """Whether products read a weight [n, k] like this; experts are fused in floats only."""
        return (
            len(shape) == 2
            and codes.tile_size(layout.bits, layout.group_size, shape[-1]) is not None
        )

    def pack_coded(self, weight: CodedWeight, *, rounds: bool) -> PackedWeight:
        """Brings a weight of few bits to the device. rounds: rows of x are rounded where torch has
        such a product: many rows times 8 bits with a scale for each row of the weight. Elsewhere
        they stay as they are, which is more precise."""
        if rounds and int8.is_of_rows(weight):
            return int8.of_rows(weight, self._device)
        return codes.CudaCodes(weight, self._device)

    def choose(
        self,
        logits: Tensor,
        bias: Tensor | None,
        rule: RouteRule,
        dtype: torch.dtype,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses by softmax over all experts in one launch; see Kernels."""
        known = RouteRule(top_k=rule.top_k, is_normed=rule.is_normed, norm_min=rule.norm_min)
        if rule != known or not self.takes(logits):
            return super().choose(logits, bias, rule, dtype, factors)
        norm_min = rule.norm_min if rule.is_normed else None
        weights, ids = experts_module.route(logits, bias, rule.top_k, dtype, norm_min)
        return weights if factors is None else weights * factors[ids], ids

    def can_run_experts(self, x: Tensor, down: Tensor) -> bool:
        return self.takes(x, down)

    def run_experts(
        self, x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        """Computes the weighted sum of experts; see Kernels. The first call for new shapes compiles
        every variant that later calls may need."""
        kind = x.dtype, x.stride(0), experts.shape[1], gate_up.shape, down.shape
        if kind not in self._compiled:
            self._compiled.add(kind)
            experts_module.compile_products(x, experts.shape[1], gate_up, down)
        return experts_module.run_experts(x, weights, experts, gate_up, down)
