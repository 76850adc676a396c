"""Products with weights in int8 that have one scale for each row, and perhaps a shift:

    weight = scales[r] * code + shifts[r]

    few rows     the weight's codes in the product, x as it is: see codes.py
    many rows    torch's own int8 product; x is rounded too, with a scale for each of its rows,
                 whose largest magnitude becomes 127:
                 out[t, r] = x_scales[t] * scales[r] * (sum of code * code) + totals[t] * shifts[r]

Shapes: x has T rows, the weight is [n, k]; totals [T] are the sums of the rounded rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmdeploy_llm.kernels import plain
from mmdeploy_llm.kernels.coded import CodedWeight

from .codes import FEW_ROWS, MAX_TILE, DeviceCodes

BLOCK = 1024  # values of a row that a program has at once
ZERO = 128  # the code of zero of a symmetric weight
MULTIPLE = 8  # of n and k, which torch's int8 product needs on CUDA; it also needs over 16 rows


@triton.jit
def _round_rows(x_ptr, x_stride, out_ptr, scales_ptr, totals_ptr, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, k, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < k, other=0.0).to(tl.float32)
        largest = tl.where(x == x, tl.maximum(largest, tl.abs(x)), float("inf"))
    most = tl.max(largest, axis=0)
    is_finite = most < float("inf")  # else no result of the row is a number
    scale = tl.where(is_finite, tl.maximum(most / 127.0, 1e-30), 1.0)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, k, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < k, other=0.0).to(tl.float32)
        codes = tl.floor(tl.where(is_finite, x, 0.0) / scale + 0.5).to(tl.int8)
        total += codes
        tl.store(out_ptr + row * k + columns, codes, mask=columns < k)
    scale = tl.where(is_finite, scale, float("nan"))
    tl.store(scales_ptr + row, scale)
    tl.store(totals_ptr + row, scale * tl.sum(total, axis=0).to(tl.float32))


@triton.jit
def _scale_sums(
    sums_ptr, x_scales_ptr, totals_ptr, scales_ptr, shifts_ptr, bias_ptr, out_ptr, n,
    HAS_SHIFTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    scales = tl.load(x_scales_ptr + row) * tl.load(scales_ptr + columns, mask=inside, other=0.0)
    out = tl.load(sums_ptr + row * n + columns, mask=inside, other=0).to(tl.float32) * scales
    if HAS_SHIFTS:
        shifts = tl.load(shifts_ptr + columns, mask=inside, other=0.0)
        out += tl.load(totals_ptr + row) * shifts
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds x [T, k] to int8 [T, k]. Returns the scale and the sum of each row too, [T]
    float32."""
    num_rows, k = x.shape
    out = torch.empty(num_rows, k, dtype=torch.int8, device=x.device)
    scales, totals = torch.empty(2, num_rows, dtype=torch.float32, device=x.device)
    _round_rows[(num_rows,)](x, x.stride(0), out, scales, totals, k, BLOCK=BLOCK, num_warps=4)
    return out, scales, totals


def is_of_rows(weight: CodedWeight) -> bool:
    """Whether a weight is symmetric in 8 bits, with a scale for each row, so that Int8Rows holds
    it."""
    is_whole = weight.bits == 8 and weight.group_size >= weight.k and not weight.is_float8
    if not is_whole or weight.zeros is None or weight.columns is not None:
        return False
    return bool((weight.zeros == ZERO).all())


def of_rows(weight: CodedWeight, device: torch.device) -> Int8Rows:
    """Returns a weight that `is_of_rows` on a device."""
    codes = (weight.codes() ^ ZERO).view(torch.int8).contiguous()
    return Int8Rows(codes, weight.scales[:, 0], None, device)


class Int8Rows:
    """A kernels.PackedWeight in int8 on a GPU, with a scale for each row, and perhaps a shift."""

    def __init__(
        self, codes: Tensor, scales: Tensor, shifts: Tensor | None, device: torch.device
    ) -> None:
        """codes: [n, k] int8, contiguous. scales, shifts: [n] float32. device: where products are
        computed."""
        n, k = codes.shape
        self._codes = DeviceCodes(
            bits=8,
            k=k,
            group_size=-(-k // MAX_TILE) * MAX_TILE,
            tile=MAX_TILE,
            data=codes.to(device),
            scales=scales.to(device).view(n, 1),
            offsets=None if shifts is None else -shifts.to(device).view(n, 1),
        )
        self._shifts = None if shifts is None else shifts.to(device)
        self._has_product = n % MULTIPLE == 0 and k % MULTIPLE == 0

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]; see PackedWeight. Of sizes for which torch has no
        int8 product the weight is dequantised for many rows."""
        if x.shape[0] <= FEW_ROWS:
            return self._codes.multiplied(x, bias, dtype)
        if not self._has_product:
            return plain.linear(x, self._codes.dequantized(x.dtype), bias, dtype)
        rounded, x_scales, totals = round_rows(x)
        sums = torch._int_mm(rounded, self._codes.data.t())
        out = torch.empty(sums.shape, dtype=dtype or x.dtype, device=x.device)
        grid = out.shape[0], triton.cdiv(out.shape[1], BLOCK)
        shifts = x_scales if self._shifts is None else self._shifts  # a pointer that is not read
        _scale_sums[grid](
            sums, x_scales, totals, self._codes.scales, shifts, x if bias is None else bias, out,
            out.shape[1], HAS_SHIFTS=self._shifts is not None, HAS_BIAS=bias is not None,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        return out

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows, [T] -> [T, k]."""
        return self._codes.rows(indices).dequantized(dtype)
