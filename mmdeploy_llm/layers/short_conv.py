"""ShortConv: a causal convolution over a few tokens, whose last inputs are a state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.forward import StateContext

from .linear import empty_parameter


class ShortConv(nn.Module):
    """Convolves each of C channels with its own k weights over the last k tokens, then applies silu
    if has_silu. weight: [C, 1, k], as torch's Conv1d has it. state: [C, k - 1], the last inputs."""

    def __init__(self, num_channels: int, kernel_size: int, *, has_silu: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(num_channels, 1, kernel_size)
        self.has_silu = has_silu

    @property
    def state_shape(self) -> tuple[int, int]:
        """Shape of the state of one sequence."""
        num_channels, _, kernel_size = self.weight.shape
        return num_channels, kernel_size - 1

    def forward(self, x: Tensor, state: Tensor, states: StateContext) -> Tensor:
        """Convolves the tokens [T, C] of all sequences and writes their last inputs. state:
        [rows, C, k - 1]."""
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
