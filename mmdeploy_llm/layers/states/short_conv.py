"""Causal convolutions over a few tokens, whose last inputs are a state: ShortConv, and
GatedShortConv with gates and projections."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.caches import State
from mmdeploy_llm.forward import StateContext
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear, empty_parameter


class ShortConv(KernelLayer):
    """Convolves each of C channels with its own k weights over the last k tokens, then applies silu
    if has_silu. weight: [C, 1, k], as torch's Conv1d has it. bias: [C] or None. state: [C, k - 1],
    the last inputs."""

    def __init__(
        self, num_channels: int, kernel_size: int, *, has_silu: bool, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(num_channels, 1, kernel_size)
        self.bias = empty_parameter(num_channels) if has_bias else None
        self.has_silu = has_silu

    def forward(self, x: Tensor, state: Tensor, states: StateContext) -> Tensor:
        """Convolves the tokens [T, C] of all sequences and writes their last inputs. state:
        [rows, C, k - 1]."""
        if self.kernels.can_convolve(x, self.weight, state):
            return self.kernels.short_conv(
                x, self.weight, self.bias, state, states, has_silu=self.has_silu
            )
        count, out = states.num_decode, torch.empty_like(x)
        if count:
            out[:count] = self._decode(x[:count], state, states)
        start = count
        for index, length in enumerate(states.query_lens[count:], count):
            end = start + length
            row, written = states.read[index], states.write[index]
            padded = torch.cat([state[row].T, x[start:end]])
            out[start:end] = self._convolved(padded, length)
            state[written] = padded[length:].T
            start = end
        if self.bias is not None:
            out += self.bias
        return F.silu(out) if self.has_silu else out

    def _convolved(self, padded: Tensor, length: int) -> Tensor:
        """Convolves the last `length` of the rows [length + k - 1, C], in float32: torch has no
        fast convolution in bf16 on every CPU."""
        weight, wide = self.weight[:, 0].float(), padded.float()
        out = wide[:length] * weight[:, 0]
        for index in range(1, weight.shape[1]):
            out.addcmul_(wide[index : index + length], weight[:, index])
        return out.to(padded.dtype)

    def _decode(self, x: Tensor, state: Tensor, states: StateContext) -> Tensor:
        """Convolves one token of each sequence, [B, C]."""
        rows = slice(x.shape[0])
        window = torch.cat([state[states.read[rows]], x[:, :, None]], 2)
        state.index_copy_(0, states.write[rows], window[..., 1:])
        return (window.float() * self.weight[:, 0].float()).sum(-1).to(x.dtype)


class GatedShortConv(KernelLayer):
    """Computes out_proj(C * conv(B * x)), where in_proj gives B, C and x."""

    divided_counts = ("num_channels",)

    def __init__(
        self, hidden_size: int, kernel_size: int, layer: int, *, has_bias: bool = False
    ) -> None:
        """layer: its index in the model."""
        super().__init__()
        self.layer = layer
        self.num_channels = hidden_size  # of this rank
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias=has_bias)
        self.conv = ShortConv(hidden_size, kernel_size, has_silu=False, has_bias=has_bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias=has_bias)

    @staticmethod
    def state_of(hidden_size: int, kernel_size: int) -> State:
        """Returns the state of a sequence."""
        return State(shapes=((hidden_size, kernel_size - 1),), dtypes=("model",))

    @property
    def head_rows(self) -> Mapping[str, tuple[slice, ...]]:
        """The rows of each parameter that belong to channels; read by tensor parallelism."""
        size = self.conv.weight.shape[0]
        parts = tuple(slice(index * size, (index + 1) * size) for index in range(3))
        rows = {"in_proj.weight": parts, "conv.weight": parts[:1]}
        if self.conv.bias is not None:
            rows |= {"in_proj.bias": parts, "conv.bias": parts[:1]}
        return rows

    def forward(self, x: Tensor, states: StateContext) -> Tensor:
        """Computes the layer, [T, hidden] -> [T, hidden], and writes the state."""
        (state,) = states.tensors(self.layer)
        before, after, values = torch.split(self.in_proj(x), self.num_channels, 1)
        convolved = self.conv(self.kernels.gated_mul(before, values, None), state, states)
        out: Tensor = self.out_proj(self.kernels.gated_mul(after, convolved, None))
        return out
