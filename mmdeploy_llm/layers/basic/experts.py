"""Experts: the stacked experts of a mixture.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states, I width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels import ActivationName, Gates, Kernels, Quantization, plain
from mmdeploy_llm.kernels.coded import CodedWeight
from mmdeploy_llm.kernels.mixtures import Mixture
from mmdeploy_llm.kernels.packed_pairs import PackedPairs
from mmdeploy_llm.values.options.weight_formats import rounds_inputs

from .kernel_layer import KernelLayer
from .linear import emptied, empty_parameter, of_rows
from .mlp import Activation, gated
from .recordings import MAX_RECORDED_ROWS


class Experts(PackedPairs, KernelLayer):
    """E gated MLPs, stacked: gate_up_proj [E, 2 I, S], down_proj [E, S, I].

    expert_parts: the checkpoint's name of each matrix of an expert -> the parameter that holds it,
        and its rows in that; read by weights.map.

    A family whose experts compute otherwise overrides `activate` and `biases`, and says so by
    `is_plain`; `gates` are what kernels know of it.
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
        """Computes the weighted sum of experts: x [T, S], weights [T, k] of x's dtype or float32,
        ids [T, k] -> [T, S] of x's dtype.

        Each expert multiplies all of its tokens at once; experts without tokens cost nothing. If
        `is_fused`, an id of E or more adds nothing.
        """
        if self.is_fused(x):
            own = self.gate_up_proj, self.down_proj
            return self.kernels.run_experts(x, weights, experts, *own)
        gates, mixture = self.gates, self._mixture(x, weights)
        if gates is not None and mixture is not None:
            changes = None if self.adapted is None else self.adapted.changes_of(x.shape[0])
            if changes is None or mixture.takes(changes):
                return mixture.run(x, weights, experts, gates, changes)
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
        total = _sum_of_experts(out.view(-1, top_k, x.shape[-1]) * weights[..., None])
        return total.to(x.dtype)

    @property
    def gates(self) -> Gates | None:
        """Says what is computed between the products; None where kernels do not know it."""
        name = "silu" if self.activation is None else self.activation.name
        return Gates(activation=name) if self.is_plain else None

    @property
    def is_packed(self) -> bool:
        """Whether the matrices are laid out for the kernels."""
        return self._packed is not None

    def is_fused(self, x: Tensor) -> bool:
        """Whether kernels run all experts, so that the host need not count their tokens."""
        is_known = self.is_plain and self.activation is None and not self._is_adapted
        return is_known and self.kernels.can_run_experts(x, self.down_proj)

    def _mixture(self, x: Tensor, weights: Tensor) -> Mixture | None:
        """Returns what computes all experts in one call, with the bits of the loop: for few tokens,
        which spend their time between calls."""
        if self.gates is None or weights.dtype not in (x.dtype, torch.float32):
            return None
        if x.shape[0] > MAX_RECORDED_ROWS or not self.kernels.takes(x):
            return None
        sizes = self.gate_up_proj.shape[-1], self.down_proj.shape[-1]
        return self.mixture(self.kernels, sizes, x.dtype, self.biases)

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
            return plain.linear(x, self.get_parameter(name)[expert], bias)
        packed = self._packed[expert][name == "down_proj"]
        return packed.product(x, bias)

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """Returns the biases of gate and up together, [2 I], and of down, [S]."""
        del expert
        return None, None

    def activate(self, both: Tensor) -> Tensor:
        """Computes the input of down, [n, I], from gate and up, [n, 2 I]."""
        if self.activation is None and self.is_packed:
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
