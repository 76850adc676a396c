"""Layers with a state of each sequence, see src/states.h."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdeploy_llm.forward import StateContext
from mmdeploy_llm.kernels.states import DeltaInputs

from .library import DTYPES, Library
from .signatures import DeltaArgs

MAX_TAPS = 8  # as in states.h
MAX_KEYS = 256  # likewise
LANES = 16  # values in the widest registers: columns of a matrix are multiples of it
HAS_SILU = 16  # added to the number of taps


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
        self._library.mm_short_conv(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            state.data_ptr(),
            out.data_ptr(),
            states.starts.data_ptr(),
            states.read.data_ptr(),
            states.write.data_ptr(),
            len(states.query_lens),
            x.shape[1],
            weight.shape[-1] | (HAS_SILU if has_silu else 0),
            torch.get_num_threads(),
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
        args = DeltaArgs(
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
            num_threads=torch.get_num_threads(),
        )
        self._library.mm_delta_rule(DTYPES[out.dtype], args)
        return out
