"""Kernels for rows: RMSNorm with the residual addition before it, and SiLU times up.

They round as plain torch does: a value that torch stores between two operations is rounded to the
dtype. Shapes: T rows, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # a program computes at least this many values
SILU_TILE = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, x_stride, residual_ptr, weight_ptr, out_ptr, num_rows, size, eps,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    is_in = (rows < num_rows) & (columns < size)
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + rows * x_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        places = residual_ptr + rows * size + columns
        x += tl.load(places, mask=is_in, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(places, rounded, mask=is_in)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    normed = (x * scale[:, None]).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + rows * size + columns, normed.to(dtype), mask=is_in)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    """Norms x [T, C]. residual: [T, C] contiguous; x is added to it in place, and the sum is
    normed."""
    num_rows, size = x.shape
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        x, x.stride(0), x if residual is None else residual, weight, out, num_rows, size, eps,
        HAS_RESIDUAL=residual is not None, ROWS=rows, BLOCK=block,
        num_warps=min(16, max(4, rows * block // 512)),
    )  # fmt: skip
    return out


@triton.jit
def silu_times(gate, up, dtype: tl.constexpr):
    """Returns silu(gate) * up in float32, of values that are first rounded to the dtype."""
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return activated * up.to(dtype).to(tl.float32)


@triton.jit
def _silu_mul(gate_ptr, gate_stride, up_ptr, up_stride, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, silu_times(gate, up, dtype).to(dtype), mask=is_in)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, both [T, C] with contiguous channels."""
    num_rows, size = gate.shape
    out = torch.empty((num_rows, size), dtype=gate.dtype, device=gate.device)
    grid = (num_rows, triton.cdiv(size, SILU_TILE))
    _silu_mul[grid](gate, gate.stride(0), up, up.stride(0), out, size, BLOCK=SILU_TILE, num_warps=4)
    return out
