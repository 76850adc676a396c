"""Feed-forward layers: gated (gate and up projection fused) and plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.kernels import ActivationName, plain
from mmdeploy_llm.kernels.plain import ACTIVATIONS, row_chunks

from .kernel_layer import KernelLayer
from .linear import Linear, MergedLinear, of_rows

AnyActivation = ActivationName
# Values in an intermediate result; see kernels/plain.py.
MAX_VALUES = 4 * 2**20
# Up to this many rows one product for gate and up is faster. With more rows two products are as
# fast, and the activation then reads whole rows, in a third of the time.
MAX_FUSED_ROWS = 64


def silu_mul(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up [..., I] from gate and up concatenated, [..., 2 I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gated(gate_up: Tensor, activation: Activation | None) -> Tensor:
    """Computes activation(gate) * up [..., I], silu without an activation, from gate and up
    concatenated, [..., 2 I]."""
    if activation is None:
        return silu_mul(gate_up)
    return activation.times(*gate_up.chunk(2, -1))


class GatedMLP(KernelLayer):
    """Computes down(activation(gate(x)) * up(x)), silu by default. Checkpoint names: gate_proj,
    up_proj, down_proj."""

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: AnyActivation = "silu",
    ) -> None:
        super().__init__()
        self.activation = None if activation == "silu" else Activation(activation)
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(size, parts, bias=bias)
        self.down_proj = Linear(intermediate_size, size, bias=bias)
        self.intermediate_size = intermediate_size

    def forward(self, x: Tensor) -> Tensor:
        """Computes the MLP, [T, size] -> [T, size]."""
        if self.activation is not None:
            other: Tensor = self.down_proj(gated(self.gate_up_proj(x), self.activation))
            return other
        if not self.kernels.is_compiled and (x.is_cuda or x.shape[0] <= MAX_FUSED_ROWS):
            out: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
            return out
        chunks = row_chunks(x, self.intermediate_size, MAX_VALUES)
        outs = [self._chunk(x[rows], rows) for rows in chunks]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _chunk(self, x: Tensor, rows: slice) -> Tensor:
        with of_rows(rows, self.gate_up_proj, self.down_proj):
            out: Tensor = self.down_proj(self._activate(x))
        return out

    def _activate(self, x: Tensor) -> Tensor:
        """Computes silu(gate(x)) * up(x); plain torch uses two products."""
        if self.kernels.takes(x):
            return self.kernels.silu_mul(*self.gate_up_proj(x).chunk(2, -1))
        if self.gate_up_proj.adapted is not None:
            return silu_mul(self.gate_up_proj(x))
        weights = self.gate_up_proj.weight.chunk(2)
        bias = self.gate_up_proj.bias
        biases = (None, None) if bias is None else bias.chunk(2)
        gate, up = (plain.linear(x, *pair) for pair in zip(weights, biases, strict=True))
        return F.silu(gate, inplace=True).mul_(up)


class Activation(KernelLayer):
    """Computes an activation by its name in transformers, in the memory of its input with kernels.
    Torch computes the last values of a thread's share, where they do not fill a register, by other
    code; in the kernels a value's result depends on nothing else."""

    def __init__(self, name: AnyActivation) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Computes the activation of each value, which may overwrite `x` [T, size]."""
        return self.kernels.activate(x, self.name)

    def times(self, gate: Tensor, up: Tensor) -> Tensor:
        """Computes activation(gate) * up, both [T, size]."""
        return self.kernels.gated_mul(gate, up, self.name)


def _known(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns the Activation that computes the same function; `activation` if there is none."""
    names = (name for name, function in ACTIVATIONS.items() if function is activation)
    name = next(names, None)
    return activation if name is None else Activation(name)


class MLP(nn.Module):
    """Computes fc2(activation(fc1(x)))."""

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        out_size: int,
        activation: Callable[[Tensor], Tensor] | AnyActivation,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.fc1 = Linear(size, intermediate_size, bias=bias)
        self.fc2 = Linear(intermediate_size, out_size, bias=bias)
        self.activation: Callable[[Tensor], Tensor] = (
            Activation(activation) if isinstance(activation, str) else _known(activation)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Computes the MLP, [T, size] -> [T, out_size]."""
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out
