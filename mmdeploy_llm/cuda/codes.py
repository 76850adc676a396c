"""Products with weights of 4 and 8 bits: few rows read the codes in the product; for more, the
weight is dequantised for the time of one product of torch.

    out[t, r] = sum over g of: scales[r, g] * (sum of x * code in g) - offsets[r, g] * (sum of x)

Codes are integers below 256, which float16 and bfloat16 hold exactly. Each row is added in one
order, whatever the other rows are. Shapes are those of kernels.coded: n rows, k columns, G groups
and U units of a row; x has T rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits, CodedWeight, num_units

FEW_ROWS = 32  # of x, which read the codes
TILE_ROWS = 16  # of x; the fewest that tl.dot takes
TILE_OUTPUTS = 32
MAX_TILE = 128  # codes of a row at a time
MIN_TILE: dict[Bits, int] = {4: 32, 8: 16}  # tl.dot takes 16 values or more of a row
TILE_DEQUANTIZED = 64  # rows of the weight


def tile_size(bits: Bits, group_size: int, k: int) -> int | None:
    """Returns how many codes of a row are read at a time: a power of two that divides a group. None
    where the kernels have none."""
    if group_size >= k:
        return MAX_TILE
    largest = min(MAX_TILE, group_size & -group_size)
    return largest if largest >= MIN_TILE[bits] else None


@triton.jit
def _codes(units_ptr, rows, is_row, first, unit_stride, TILE: tl.constexpr, BITS: tl.constexpr):
    """Loads the bytes that hold codes first .. first + TILE of some rows, [rows, bytes]."""
    places = first * BITS // 8 + tl.arange(0, TILE * BITS // 8)
    inside = is_row[:, None] & (places < unit_stride * 4)[None, :]
    own = units_ptr + rows[:, None] * (unit_stride * 4) + places[None, :]
    return tl.load(own, mask=inside, other=0)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x_ptr, x_stride, units_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr,
    num_rows, n, k, unit_stride, group_size, num_groups,
    HAS_BIAS: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    outputs = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_output, is_row = outputs < n, rows < num_rows
    dtype = x_ptr.dtype.element_ty
    bytes_of_tile: tl.constexpr = TILE * BITS // 8
    at = tl.arange(0, bytes_of_tile)
    # Byte j of a unit of 4 bits holds code j below code 4 + j.
    low = at // 4 * 8 + at % 4 if BITS == 4 else at
    x_rows = x_ptr + rows[:, None] * x_stride
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, k, TILE):
        data = _codes(units_ptr, outputs, is_output, first, unit_stride, TILE, BITS)
        columns = first + low
        inside = is_row[:, None] & (columns < k)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=inside, other=0.0)
        sums = tl.sum(x.to(tl.float32), axis=1)
        codes = (data & 15 if BITS == 4 else data).to(tl.float32).to(dtype)
        part = tl.dot(x, tl.trans(codes), input_precision="ieee")
        if BITS == 4:
            columns += 4
            inside = is_row[:, None] & (columns < k)[None, :]
            x = tl.load(x_rows + columns[None, :], mask=inside, other=0.0)
            sums += tl.sum(x.to(tl.float32), axis=1)
            part += tl.dot(
                x, tl.trans((data >> 4).to(tl.float32).to(dtype)), input_precision="ieee"
            )
        facts = outputs * num_groups + first // group_size
        scales = tl.load(scales_ptr + facts, mask=is_output, other=0.0)
        offsets = tl.load(offsets_ptr + facts, mask=is_output, other=0.0)
        total += part * scales[None, :] - sums[:, None] * offsets[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
        total += bias[None, :]
    places = out_ptr + rows[:, None] * n + outputs[None, :]
    tl.store(places, total.to(dtype), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _dequantize(
    units_ptr, scales_ptr, offsets_ptr, out_ptr, n, k, unit_stride, group_size, num_groups,
    BITS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * TILE
    is_row = rows < n
    data = _codes(units_ptr, rows, is_row, first, unit_stride, TILE, BITS)
    facts = rows * num_groups + first // group_size
    scales = tl.load(scales_ptr + facts, mask=is_row, other=0.0)[:, None]
    offsets = tl.load(offsets_ptr + facts, mask=is_row, other=0.0)[:, None]
    dtype = out_ptr.dtype.element_ty
    at = tl.arange(0, TILE * BITS // 8)
    columns = first + (at // 4 * 8 + at % 4 if BITS == 4 else at)
    places = out_ptr + rows[:, None] * k
    codes = (data & 15 if BITS == 4 else data).to(tl.float32)
    inside = is_row[:, None] & (columns < k)[None, :]
    tl.store(places + columns[None, :], (codes * scales - offsets).to(dtype), mask=inside)
    if BITS == 4:
        columns += 4
        codes = (data >> 4).to(tl.float32)
        inside = is_row[:, None] & (columns < k)[None, :]
        tl.store(places + columns[None, :], (codes * scales - offsets).to(dtype), mask=inside)


class CudaCodes:
    """A kernels.PackedWeight in few bits on a GPU."""

    rows = None  # the layout rounds them

    def __init__(self, weight: CodedWeight, device: torch.device) -> None:
        """device: where products are computed; `weight` may be elsewhere."""
        weight = weight.in_units().with_offsets()
        assert weight.offsets is not None
        tile = tile_size(weight.bits, weight.group_size, weight.k)
        assert tile is not None
        self._tile, self._bits = tile, weight.bits
        self.n, self.k = weight.n, weight.k
        self._group_size = min(weight.group_size, -(-self.k // tile) * tile)
        self._units = weight.units.to(device).view(torch.uint8)
        self._scales, self._offsets = weight.scales.to(device), weight.offsets.to(device)
        self._columns = None if weight.columns is None else weight.columns.to(device)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]."""
        if self._columns is not None:
            x = x[:, self._columns]
        if x.shape[0] > FEW_ROWS:
            return F.linear(x, self.dequantized(x.dtype), bias)
        out = x.new_empty(x.shape[0], self.n)
        grid = triton.cdiv(self.n, TILE_OUTPUTS), triton.cdiv(x.shape[0], TILE_ROWS)
        _few_rows[grid](
            x, x.stride(0), self._units, self._scales, self._offsets, x if bias is None else bias,
            out, x.shape[0], self.n, self.k, num_units(self.k, self._bits), self._group_size,
            self._scales.shape[1], HAS_BIAS=bias is not None, BITS=self._bits, TILE=self._tile,
            ROWS=TILE_ROWS, OUTPUTS=TILE_OUTPUTS, num_warps=4,
        )  # fmt: skip
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in the order of its codes, [n, k]."""
        out = torch.empty(self.n, self.k, dtype=dtype, device=self._units.device)
        grid = triton.cdiv(self.n, TILE_DEQUANTIZED), triton.cdiv(self.k, self._tile)
        _dequantize[grid](
            self._units, self._scales, self._offsets, out, self.n, self.k,
            num_units(self.k, self._bits), self._group_size, self._scales.shape[1],
            BITS=self._bits, TILE=self._tile, ROWS=TILE_DEQUANTIZED, num_warps=4,
        )  # fmt: skip
        return out
