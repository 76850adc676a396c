"""Layers with a state of each sequence, see cpp_layers/states.h."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdeploy_llm.forward import StateContext
from mmdeploy_llm.kernels.states import DeltaInputs

from .library import DTYPES, Library

MAX_TAPS = 8  # as in states.h
MAX_KEYS = 256  # likewise
LANES = 16  # values in the widest registers: columns of a matrix are multiples of it


class StateProducts(Library):
    """Computes the layers of kernels.StateKernels."""

    def can_convolve(self, x: Tensor, weight: Tensor, state: Tensor) -> bool:
        """Whether `short_conv` takes tensors like these."""
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
        """Convolves x [T, C] -> [T, C]; see kernels.StateKernels."""
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.short_conv(
            dtype=DTYPES[x.dtype],
            x=x.data_ptr(),
            x_stride=x.stride(0),
            weights=weight.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            states=state.data_ptr(),
            out=out.data_ptr(),
            starts=states.starts.data_ptr(),
            read=states.read.data_ptr(),
            write=states.write.data_ptr(),
            num_sequences=len(states.query_lens),
            channels=x.shape[1],
            taps=weight.shape[-1],
            has_silu=has_silu,
        )
        return out

    def can_delta(self, inputs: DeltaInputs, matrices: Tensor) -> bool:
        """Whether `gated_delta` takes tensors like these."""
        is_plain = matrices.is_contiguous() and matrices.dtype is torch.float32
        own = (inputs.qkv, inputs.z, inputs.a, inputs.b, inputs.norm_weight)
        key_dim, value_dim = matrices.shape[-2:]
        fits = key_dim <= MAX_KEYS and value_dim % LANES == 0
        return self.takes(*own) and is_plain and fits

    def gated_delta(self, inputs: DeltaInputs, matrices: Tensor, states: StateContext) -> Tensor:
        """Runs the gated delta rule, [T, value heads * V]; see kernels.StateKernels."""
        _, value_heads, key_dim, value_dim = matrices.shape
        out = self._empty(inputs.z.shape, dtype=inputs.z.dtype)
        self._library.delta_rule(
            dtype=DTYPES[out.dtype],
            qkv=inputs.qkv.data_ptr(),
            qkv_stride=inputs.qkv.stride(0),
            z=inputs.z.data_ptr(),
            z_stride=inputs.z.stride(0),
            a=inputs.a.data_ptr(),
            b=inputs.b.data_ptr(),
            ab_stride=inputs.a.stride(0),
            a_log=inputs.a_log.data_ptr(),
            dt_bias=inputs.dt_bias.data_ptr(),
            norm_weight=inputs.norm_weight.data_ptr(),
            matrices=matrices.data_ptr(),
            out=out.data_ptr(),
            starts=states.starts.data_ptr(),
            read=states.read.data_ptr(),
            write=states.write.data_ptr(),
            num_sequences=len(states.query_lens),
            key_heads=(inputs.qkv.shape[1] - value_heads * value_dim) // (2 * key_dim),
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            eps=inputs.eps,
        )
        return out
