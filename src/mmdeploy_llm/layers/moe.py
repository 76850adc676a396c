"""Mixture of experts: router, stacked experts, shared experts, and experts chosen by modality.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states, I width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.basic_layers.kernel_layer import KernelLayer
from mmdeploy_llm.basic_layers.linear import (
    Linear,
    Matrix,
    emptied,
    empty_parameter,
    of_rows,
    plain_linear,
)
from mmdeploy_llm.basic_layers.mlp import Activation, GatedMLP, gated
from mmdeploy_llm.basic_layers.packed_pairs import PackedPairs
from mmdeploy_llm.kernels import ActivationName, ExpertKernels, Kernels, Quantization
from mmdeploy_llm.kernels.coded import CodedWeight
from mmdeploy_llm.weight_formats import rounds_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and options of a SparseMLP or ModalityMLP.

    router: "corrected" is Router, "softmax" is SoftmaxRouter.
    is_normed: whether SoftmaxRouter divides the weights of the chosen experts by their sum.
    norm_min: lower bound of the sum that Router divides by.
    shared_size: width of all shared experts together, 0 for none.
    is_shared_gated: whether a sigmoid gate weights the output of the shared experts.
    vision_intermediate_size: width of the experts for media tokens only; None when all tokens
        share the same experts.
    activation: of routed and shared experts, by its name in transformers; in a decoder whose own is
        not silu, silu stands for the decoder's.
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
    activation: ActivationName = "silu"


class Router(KernelLayer, Matrix):
    """Chooses the k experts with the largest softmax probability + correction bias, and weights
    them by their normalised probabilities. Computes in float32, with weights in float32."""

    fp32_parameters = ("weight", "correction_bias")
    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__(config.num_experts, size)
        self.correction_bias = empty_parameter(1, config.num_experts)
        self.top_k = config.top_k
        self.norm_min = config.norm_min

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes x [T, S]: weights [T, k] in x's dtype, expert ids [T, k]."""
        logits = self.product(x.float())
        kernels = self.kernels
        if kernels is not None and kernels.experts is not None and kernels.takes(logits):
            bias = self.correction_bias[0]
            return kernels.experts.route(logits, bias, self.top_k, x.dtype, self.norm_min)
        scores = logits.softmax(-1)
        experts = (scores + self.correction_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=self.norm_min)
        return weights.to(x.dtype), experts


class SoftmaxRouter(KernelLayer, Matrix):
    """Chooses the k most probable experts by softmax in float32, weighted by their probabilities,
    which are normalised if the config says so."""

    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__(config.num_experts, size)
        self.top_k = config.top_k
        self.is_normed = config.is_normed

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes x [T, S]: weights [T, k] in x's dtype, expert ids [T, k]."""
        logits = self.product(x)
        kernels = self.kernels
        if kernels is not None and kernels.experts is not None and kernels.takes(logits):
            norm_min = 0.0 if self.is_normed else None
            return kernels.experts.route(logits, None, self.top_k, x.dtype, norm_min)
        scores = logits.softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.top_k, dim=-1)
        if self.is_normed:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts


class Experts(PackedPairs, KernelLayer):
    """E gated MLPs, stacked: gate_up_proj [E, 2 I, S], down_proj [E, S, I].

    expert_parts: the checkpoint's name of each matrix of an expert -> the parameter that holds it,
        and its rows in that; read by weights.map.

    A family whose experts compute otherwise overrides `activate` and `biases`, and says so by
    `is_plain`.
    """

    is_plain = True  # an activation of the gate and no biases, which is what kernels compute
    added_once: tuple[str, ...] = ()  # parameters that one rank adds for all
    adapted: Any = None  # set while adapters change them; see linear.Adapted

    def __init__(
        self,
        num_experts: int,
        size: int,
        intermediate_size: int,
        activation: ActivationName = "silu",
    ) -> None:
        super().__init__()
        self.activation = None if activation == "silu" else Activation(activation)
        self.gate_up_proj = empty_parameter(num_experts, 2 * intermediate_size, size)
        self.down_proj = empty_parameter(num_experts, size, intermediate_size)
        self._coded: dict[str, CodedWeight] = {}
        self.expert_parts = {
            "gate_proj": ("gate_up_proj", slice(0, intermediate_size)),
            "up_proj": ("gate_up_proj", slice(intermediate_size, 2 * intermediate_size)),
            "down_proj": ("down_proj", None),
        }

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Computes the weighted sum of experts: x [T, S], weights [T, k], ids [T, k] -> [T, S].

        Each expert multiplies all of its tokens at once; experts without tokens cost nothing. If
        `is_fused`, an id of E or more adds nothing.
        """
        fused = self._fused_kernels(x)
        if fused is not None:
            return fused.run_experts(x, weights, experts, self.gate_up_proj, self.down_proj)
        top_k = experts.shape[-1]
        order = experts.flatten().argsort(stable=True)  # [T k] sorted by expert
        counts = torch.bincount(experts.flatten(), minlength=self.down_proj.shape[0])
        rows = order // top_k
        sorted_x = x.index_select(0, rows)
        if self._can_group(x):
            sorted_out = self._run_grouped(sorted_x, counts)
        else:
            with of_rows(rows, self):
                sorted_out = self._run_loop(sorted_x, counts)
        out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out)
        return _sum_of_experts(out.view(-1, top_k, x.shape[-1]) * weights[..., None])

    @property
    def is_packed(self) -> bool:
        """Whether the matrices are laid out for the kernels."""
        return self._packed is not None

    def is_fused(self, x: Tensor) -> bool:
        """Whether kernels run all experts, so that the host need not count their tokens."""
        return self._fused_kernels(x) is not None

    def _fused_kernels(self, x: Tensor) -> ExpertKernels | None:
        kernels = self.kernels
        if kernels is None or kernels.experts is None or self.activation is not None:
            return None
        if not self.is_plain or self._is_adapted or not kernels.takes(x, self.down_proj):
            return None
        return kernels.experts

    def _can_group(self, x: Tensor) -> bool:
        """Whether torch's grouped product applies: bf16 on CUDA, rows of a multiple of 16 bytes."""
        is_aligned = x.shape[-1] % 8 == 0 and self.down_proj.shape[-1] % 8 == 0
        is_plain = self.is_plain and not self._is_adapted
        return is_plain and x.is_cuda and x.dtype is torch.bfloat16 and is_aligned

    @property
    def _is_adapted(self) -> bool:
        return self.adapted is not None and self.adapted.is_active

    def _run_loop(self, x: Tensor, counts: Tensor) -> Tensor:
        """Runs experts one by one: x [T k, S] sorted by expert, counts [E] -> [T k, S]."""
        out = torch.empty_like(x)
        start = 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                rows = slice(start, start + count)
                with of_rows(rows, self):
                    out[rows] = self._run_expert(expert, x[rows])
                start += count
        return out

    def _run_expert(self, expert: int, x: Tensor) -> Tensor:
        """Runs one expert, [n, S] -> [n, S]."""
        own, last = self.biases(expert)
        hidden = self.activate(self._product("gate_up_proj", expert, x, own))
        return self._product("down_proj", expert, hidden, last)

    def _product(self, name: str, expert: int, x: Tensor, bias: Tensor | None) -> Tensor:
        out = self.own_product(name, expert, x, bias)
        return out if self.adapted is None else self.adapted.changed(name, expert, out, x)

    def own_product(self, name: str, expert: int, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies by one matrix of one expert, without adapters."""
        if self._packed is None:
            return plain_linear(x, self.get_parameter(name)[expert], bias)
        packed = self._packed[expert][name == "down_proj"]
        return packed.product(x, bias)

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns the biases of gate and up together, [2 I], and of down, [S]."""
        del expert
        return None, None

    def activate(self, both: Tensor) -> Tensor:
        """Computes the input of down, [n, I], from gate and up, [n, 2 I]."""
        if self.activation is None and self.is_packed and self.kernels is not None:
            return self.kernels.silu_mul(*both.chunk(2, -1))
        return gated(both, self.activation)

    def pack(self, kernels: Kernels, quantization: Quantization | None) -> None:
        """Packs as Matrix.pack does: either all matrices or none."""
        if self.is_packed:
            return
        if self._coded:
            return self._pack_coded(kernels, rounds=rounds_inputs(quantization))
        stacks = self.gate_up_proj.detach(), self.down_proj.detach()
        if not all(kernels.can_pack(stack, quantization) for stack in stacks):
            return
        gate_up, down = (
            [kernels.pack(weight, quantization) for weight in stack] for stack in stacks
        )
        self.take_pairs(gate_up, down)
        self.gate_up_proj, self.down_proj = emptied(self.gate_up_proj), emptied(self.down_proj)

    def can_hold_coded(self, name: str) -> bool:
        """Whether this is a parameter: each is a stack of matrices."""
        return name in self._parameters

    def hold_coded(self, name: str, weight: CodedWeight) -> None:
        """Takes the matrices of all experts in few bits, one below the other, as their checkpoint
        stores them, until they are packed. Both stacks must be given."""
        self._coded[name] = weight

    def _pack_coded(self, kernels: Kernels, *, rounds: bool) -> None:
        whole = self._coded["gate_up_proj"], self._coded["down_proj"]
        stacks = (weight.split(self.down_proj.shape[0]) for weight in whole)
        gate_up, down = (
            [kernels.pack_coded(part, rounds=rounds) for part in stack] for stack in stacks
        )
        self.take_pairs(gate_up, down)
        self._coded.clear()

    def _run_grouped(self, x: Tensor, counts: Tensor) -> Tensor:
        """Runs all experts as `_run_loop` does, without copying the counts to the host."""
        ends = counts.cumsum(0, dtype=torch.int32)
        both = F.grouped_mm(x, self.gate_up_proj.transpose(1, 2), offs=ends)
        return F.grouped_mm(gated(both, self.activation), self.down_proj.transpose(1, 2), offs=ends)


def _sum_of_experts(outs: Tensor) -> Tensor:
    """Sums over experts, [T, k, S] -> [T, S]; on a CPU one after the other, since the order of
    torch's sum depends on the number of rows."""
    if not outs.is_cpu:
        return outs.sum(1)
    first, *others = outs.unbind(1)
    total = first.float()
    for out in others:
        total = total + out
    return total.to(outs.dtype)


class SparseMLP(nn.Module):
    """Routed experts, plus shared experts if the config has them."""

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate = (SoftmaxRouter if config.router == "softmax" else Router)(size, config)
        sizes = config.num_experts, size, config.intermediate_size
        self.experts = Experts(*sizes, config.activation)
        self.shared_experts = _shared_experts(size, config)
        self.shared_expert_gate = Linear(size, 1) if config.is_shared_gated else None

    def forward(self, x: Tensor, is_left_out: Tensor | None = None) -> Tensor:
        """Computes all experts, [T, S] -> [T, S]. is_left_out: [T] bool, tokens for which the
        routed experts return 0; requires Experts.is_fused."""
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
    return GatedMLP(size, config.shared_size, bias=config.shared_bias, activation=config.activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityRows:
    """The rows of a step's text tokens and of its media tokens, int64, ascending."""

    text: Tensor
    vision: Tensor


class Modality:
    """Marks which of a step's tokens are media tokens."""

    def __init__(self, is_vision: Tensor) -> None:
        """is_vision: [T] bool."""
        self.is_vision = is_vision

    @cached_property
    def rows(self) -> ModalityRows | None:
        """The rows of each modality; None when no token is a media token. Copies the mask to the
        host, once per step."""
        vision = self.is_vision.nonzero().flatten()
        if vision.numel() == 0:
            return None
        return ModalityRows(text=self.is_vision.logical_not().nonzero().flatten(), vision=vision)


class ModalityMLP(nn.Module):
    """Routes text tokens to text experts and media tokens to vision experts; shared experts compute
    all tokens."""

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
        """Computes all experts, [T, S] -> [T, S]. modality: None when all tokens are text."""
        if modality is None:
            out: Tensor = self.text_moe(x)
        elif self.text_moe.experts.is_fused(x):
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
        for own, moe in ((rows.text, self.text_moe), (rows.vision, self.vision_moe)):
            with of_rows(own, moe.experts, moe.gate):
                out.index_copy_(0, own, moe(x.index_select(0, own)))
        return out
