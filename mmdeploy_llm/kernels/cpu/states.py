"""Layers with a state of each sequence, see cpp/states/."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.forward import StateContext
from mmdeploy_llm.kernels.states import DeltaInputs, Mamba2Inputs

from .library import Library

MAX_TAPS = 8  # as in states.h
MAX_KEYS = 256  # likewise
MAX_STATE = MAX_HEAD = 256  # as in state_space.h
LANES = 16  # values in the widest registers: columns of a matrix are multiples of it
ROWS = ("starts", "read", "write")  # of a StateContext


def _of(values: object, *names: str) -> dict[str, Any]:
    """Returns attributes by their names, which are those of the call's arguments."""
    return {name: getattr(values, name) for name in names}


class StateProducts(Library):
    """Computes the layers of kernels.StateKernels."""

    def can_convolve(self, x: Tensor, weight: Tensor, state: Tensor) -> bool:
        is_plain = weight.is_contiguous() and state.is_contiguous()
        return self.takes(x, weight, state) and is_plain and weight.shape[-1] <= MAX_TAPS

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        states: StateContext,
        *,
        has_silu: bool,
    ) -> Tensor:
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.short_conv(
            dtype=x.dtype,
            x=x,
            x_stride=x.stride(0),
            weights=weight,
            bias=bias,
            states=state,
            out=out,
            **_of(states, *ROWS),
            num_sequences=len(states.query_lens),
            channels=x.shape[1],
            taps=weight.shape[-1],
            has_silu=has_silu,
        )
        return out

    def can_delta(self, inputs: DeltaInputs, matrices: Tensor) -> bool:
        is_plain = matrices.is_contiguous() and matrices.dtype is torch.float32
        own = (inputs.qkv, inputs.z, inputs.a, inputs.b, inputs.norm_weight)
        key_dim, value_dim = matrices.shape[-2:]
        fits = key_dim <= MAX_KEYS and value_dim % LANES == 0
        return self.takes(*own) and is_plain and fits

    def gated_delta(
        self, inputs: DeltaInputs, matrices: Tensor, last: Tensor, states: StateContext
    ) -> Tensor:
        _, value_heads, key_dim, value_dim = matrices.shape
        out = self._empty(inputs.z.shape, dtype=inputs.z.dtype)
        self._library.delta_rule(
            dtype=out.dtype,
            **_of(inputs, "qkv", "z", "a", "b", "a_log", "dt_bias", "norm_weight", "eps"),
            qkv_stride=inputs.qkv.stride(0),
            z_stride=inputs.z.stride(0),
            ab_stride=inputs.a.stride(0),
            matrices=matrices,
            last=last,
            out=out,
            **_of(states, *ROWS, "source", "target"),
            num_sequences=len(states.query_lens),
            key_heads=(inputs.qkv.shape[1] - value_heads * value_dim) // (2 * key_dim),
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
        )
        return out

    def can_mamba2(self, inputs: Mamba2Inputs, matrices: Tensor) -> bool:
        is_plain = matrices.is_contiguous() and matrices.dtype is torch.float32
        norm = () if inputs.norm_weight is None else (inputs.norm_weight,)
        own = (inputs.rows, inputs.z, inputs.dt, *norm)
        state_size, head_dim = matrices.shape[-2:]
        fits = state_size <= MAX_STATE and head_dim <= MAX_HEAD and head_dim % LANES == 0
        return self.takes(*own) and is_plain and fits

    def mamba2(
        self, inputs: Mamba2Inputs, matrices: Tensor, last: Tensor | None, states: StateContext
    ) -> Tensor:
        _, heads, state_size, head_dim = matrices.shape
        out = self._empty(inputs.z.shape, dtype=inputs.z.dtype)
        self._library.mamba2(
            dtype=out.dtype,
            **_of(inputs, "rows", "z", "dt", "a_log", "dt_bias", "skip", "norm_weight", "eps"),
            row_stride=inputs.rows.stride(0),
            z_stride=inputs.z.stride(0),
            dt_stride=inputs.dt.stride(0),
            matrices=matrices,
            last=last,
            out=out,
            **_of(states, *ROWS, "source", "target"),
            num_sequences=len(states.query_lens),
            heads=heads,
            head_dim=head_dim,
            state_size=state_size,
            groups=inputs.num_groups,
            dt_min=inputs.limits[0],
            dt_max=inputs.limits[1],
        )
        return out
