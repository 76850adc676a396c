"""Mixture of experts: router, stacked experts, shared experts, and experts chosen by modality.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states, I of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.native import Kernels

from .linear import Linear, emptied, empty_parameter
from .mlp import GatedMLP, silu_mul
from .packed import PackedWeight, Quantization, can_pack, pack_weight
from .with_kernels import WithKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """router: "corrected" is Router, "softmax" SoftmaxRouter. is_normed: whether SoftmaxRouter
    divides the weights of the chosen experts by their sum. norm_min: smallest sum by which Router
    does.

    shared_size: width of the shared experts together, 0 for none. is_shared_gated: whether a
    sigmoid gate weighs what they give. vision_intermediate_size: width of the experts that media
    tokens have to themselves, None when all tokens share the same ones.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: Literal["corrected", "softmax"] = "corrected"
    is_normed: bool = True
    norm_min: float = 1e-12
    shared_size: int = 0
    shared_bias: bool = False
    is_shared_gated: bool = False
    vision_intermediate_size: int | None = None


class Router(WithKernels):
    """Softmax over the experts; the k best by probability + correction bias, weighted by their
    normalised probabilities. All in float32, weights included."""

    fp32_parameters = ("weight", "correction_bias")

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(config.num_experts, size)
        self.correction_bias = empty_parameter(1, config.num_experts)
        self.top_k = config.top_k
        self.norm_min = config.norm_min

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, S] -> weights [T, k] in x's dtype, expert numbers [T, k]."""
        logits = F.linear(x.float(), self.weight)
        if self.device_kernels is not None and self.device_kernels.takes(logits):
            bias = self.correction_bias[0]
            return self.device_kernels.route(logits, bias, self.top_k, x.dtype, self.norm_min)
        scores = logits.softmax(-1)
        experts = (scores + self.correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=self.norm_min)
        return weights.to(x.dtype), experts


class SoftmaxRouter(WithKernels):
    """Softmax over the experts, in float32; the k most probable, weighted by their probabilities,
    which are normalised where the config says so."""

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__()
        self.weight = empty_parameter(config.num_experts, size)
        self.top_k = config.top_k
        self.is_normed = config.is_normed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, S] -> weights [T, k] in x's dtype, expert numbers [T, k]."""
        logits = F.linear(x, self.weight)
        if self.device_kernels is not None and self.device_kernels.takes(logits):
            norm_min = 0.0 if self.is_normed else None
            return self.device_kernels.route(logits, None, self.top_k, x.dtype, norm_min)
        scores = logits.softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.top_k, dim=-1)
        if self.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts


class Experts(WithKernels):
    """E gated MLPs, stacked: gate_up_proj [E, 2 I, S], down_proj [E, S, I].

    expert_parts: the checkpoint's name of each matrix of an expert, and its place; weights.map
    reads it.
    """

    def __init__(self, num_experts: int, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = empty_parameter(num_experts, 2 * intermediate_size, size)
        self.down_proj = empty_parameter(num_experts, size, intermediate_size)
        self._packed: list[tuple[PackedWeight | None, PackedWeight | None]] | None = None
        self.expert_parts = {
            "gate_proj": ("gate_up_proj", slice(0, intermediate_size)),
            "up_proj": ("gate_up_proj", slice(intermediate_size, 2 * intermediate_size)),
            "down_proj": ("down_proj", None),
        }

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """[T, S], weights [T, k], expert numbers [T, k] -> [T, S].

        Each expert sees its tokens in one product; experts without tokens cost nothing. Where
        `is_on_device`, expert numbers from E on add nothing.
        """
        if self.is_on_device(x):
            assert self.device_kernels is not None
            matrices = self.gate_up_proj, self.down_proj
            return self.device_kernels.run_experts(x, weights, experts, *matrices)
        top_k = experts.shape[-1]
        order = experts.flatten().argsort(stable=True)  # [T k] sorted by expert
        counts = torch.bincount(experts.flatten(), minlength=self.down_proj.shape[0])
        sorted_x = x.index_select(0, order // top_k)
        if self._can_group(x):
            sorted_out = self._run_grouped(sorted_x, counts)
        else:
            sorted_out = self._run_loop(sorted_x, counts)
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return (out.view(-1, top_k, x.shape[-1]) * weights[..., None]).sum(1)

    def is_on_device(self, x: Tensor) -> bool:
        """Whether the host needs not know how many tokens an expert has."""
        return self.device_kernels is not None and self.device_kernels.takes(x, self.down_proj)

    def _can_group(self, x: Tensor) -> bool:
        """Whether torch's grouped product applies: bf16 on CUDA, rows of whole 16 bytes."""
        is_aligned = x.shape[-1] % 8 == 0 and self.down_proj.shape[-1] % 8 == 0
        return x.is_cuda and x.dtype is torch.bfloat16 and is_aligned

    def _run_loop(self, x: Tensor, counts: Tensor) -> Tensor:
        """`x` [T k, S] sorted by expert, counts [E] -> [T k, S]."""
        out = torch.empty_like(x)
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                rows = slice(start, start + count)
                out[rows] = self._run_expert(expert, x[rows])
                start += count
        return out

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:
        """[n, S] -> [n, S]."""
        if self._packed is None or self.kernels is None:
            hidden = silu_mul(F.linear(x, self.gate_up_proj[expert]))
            return F.linear(hidden, self.down_proj[expert])
        gate_up, down = self._packed[expert]
        assert gate_up is not None and down is not None  # noqa: PT018 - can_pack has said so
        hidden = self.kernels.silu_mul(*gate_up.product(x, None).chunk(2, -1))
        return down.product(hidden, None)

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """See Matrix.pack."""
        stacks = self.gate_up_proj.detach(), self.down_proj.detach()
        if not all(can_pack(stack, kernels, quantization) for stack in stacks):
            return
        gate_up, down = (
            [pack_weight(weight, kernels, quantization) for weight in stack] for stack in stacks
        )
        self._packed = list(zip(gate_up, down, strict=True))
        self.gate_up_proj, self.down_proj = emptied(self.gate_up_proj), emptied(self.down_proj)

    def _run_grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        """The same without the host knowing the counts."""
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = silu_mul(F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends))
        return F.grouped_mm(hidden, self.down_proj.transpose(1, 2), offs=ends)


class SparseMLP(nn.Module):
    """Routed experts, and shared ones where the config has them."""

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate = (SoftmaxRouter if config.router == "softmax" else Router)(size, config)
        self.experts = Experts(config.num_experts, size, config.intermediate_size)
        self.shared_experts = _shared_experts(size, config)
        self.shared_expert_gate = Linear(size, 1) if config.is_shared_gated else None

    def forward(self, x: Tensor, is_left_out: Tensor | None = None) -> Tensor:
        """[T, S] -> [T, S]. is_left_out: [T] bool, tokens for which the routed experts give 0; for
        Experts.is_on_device."""
        weights, experts = self.gate(x)
        if is_left_out is not None:
            experts = experts.masked_fill(is_left_out[:, None], self.experts.down_proj.shape[0])
        out: Tensor = self.experts(x, weights, experts)
        if self.shared_experts is None:
            return out
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x).sigmoid_() * shared
        return out.add_(shared)


def _shared_experts(size: int, config: MoEConfig) -> GatedMLP | None:
    if config.shared_size == 0:
        return None
    return GatedMLP(size, config.shared_size, bias=config.shared_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityRows:
    """Rows of a step's text tokens and of its media tokens, int64, ascending."""

    text: Tensor
    vision: Tensor


class Modality:
    """Which of a step's tokens are media tokens."""

    def __init__(self, is_vision: Tensor) -> None:
        """is_vision: [T] bool."""
        self.is_vision = is_vision

    @cached_property
    def rows(self) -> ModalityRows | None:
        """None when no token is a media token. The host waits for the mask, once per step."""
        vision = self.is_vision.nonzero().flatten()
        if vision.numel() == 0:
            return None
        return ModalityRows(text=self.is_vision.logical_not().nonzero().flatten(), vision=vision)


class ModalityMLP(nn.Module):
    """Text tokens go to the text experts, media tokens to the vision experts; shared experts see
    all."""

    def __init__(self, size: int, config: MoEConfig) -> None:
        """config.vision_intermediate_size must be set."""
        super().__init__()
        assert config.vision_intermediate_size is not None
        text = replace(config, shared_size=0)
        vision = replace(text, intermediate_size=config.vision_intermediate_size)
        self.text_moe = SparseMLP(size, text)
        self.vision_moe = SparseMLP(size, vision)
        self.shared_experts = _shared_experts(size, config)

    def forward(self, x: Tensor, modality: Modality | None) -> Tensor:
        """[T, S] -> [T, S]. modality: None when all tokens are text."""
        if modality is None:
            out: Tensor = self.text_moe(x)
        elif self.text_moe.experts.is_on_device(x):
            is_vision = modality.is_vision
            out = self.text_moe(x, is_vision).add_(self.vision_moe(x, is_vision.logical_not()))
        else:
            out = self._route(x, modality.rows)
        return out if self.shared_experts is None else out.add_(self.shared_experts(x))

    def _route(self, x: Tensor, rows: ModalityRows | None) -> Tensor:
        if rows is None or rows.text.numel() == 0:
            out: Tensor = (self.text_moe if rows is None else self.vision_moe)(x)
            return out
        out = torch.empty_like(x)
        out.index_copy_(0, rows.text, self.text_moe(x.index_select(0, rows.text)))
        return out.index_copy_(0, rows.vision, self.vision_moe(x.index_select(0, rows.vision)))
