"""Products with weights of 4 and 8 bits: few rows read the codes in the product; for more, the
weight is dequantised for the time of one product of torch.

    out[t, r] = sum over g of: scales[r, g] * (sum of x * code in g) - offsets[r, g] * (sum of x)

Codes are integers of 8 bits at most, or 8-bit floats (e4m3fn), all of which float16 and bfloat16
hold exactly. Each row is added in one order, whatever the other rows are. Shapes are those of
kernels.coded: n rows, k columns, G groups and U units of a row; x has T rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmdeploy_llm.kernels import plain
from mmdeploy_llm.kernels.coded import Bits, CodedWeight

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
def _codes(data_ptr, rows, is_row, first, row_bytes, TILE: tl.constexpr, BITS: tl.constexpr):
    """Loads the bytes that hold codes first .. first + TILE of some rows, [rows, bytes]."""
    places = first * BITS // 8 + tl.arange(0, TILE * BITS // 8)
    inside = is_row[:, None] & (places < row_bytes)[None, :]
    own = data_ptr + rows[:, None] * row_bytes + places[None, :]
    return tl.load(own, mask=inside, other=0)


@triton.jit
def _values(codes, IS_FLOAT8: tl.constexpr):
    """Returns codes as float32, exactly. GPUs before 8.9 cannot convert 8-bit floats: their
    bits are those of a float16 whose exponent is 8 too small, subnormal numbers included."""
    if IS_FLOAT8:
        bits = codes.to(tl.int32)
        halves = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where((bits & 127) == 127, float("nan"), halves.to(tl.float32) * 256.0)
    return codes.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x_ptr, x_stride, data_ptr, scales_ptr, offsets_ptr, bias_ptr, out_ptr,
    num_rows, n, k, row_bytes, group_size, num_groups,
    HAS_BIAS: tl.constexpr, HAS_OFFSETS: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT8: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
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
        data = _codes(data_ptr, outputs, is_output, first, row_bytes, TILE, BITS)
        columns = first + low
        inside = is_row[:, None] & (columns < k)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=inside, other=0.0)
        sums = tl.sum(x.to(tl.float32), axis=1)
        codes = _values(data & 15 if BITS == 4 else data, IS_FLOAT8).to(dtype)
        part = tl.dot(x, tl.trans(codes), input_precision="ieee")
        if BITS == 4:
            columns += 4
            inside = is_row[:, None] & (columns < k)[None, :]
            x = tl.load(x_rows + columns[None, :], mask=inside, other=0.0)
            sums += tl.sum(x.to(tl.float32), axis=1)
            part += tl.dot(
                x, tl.trans((data >> 4).to(tl.float32).to(dtype)), input_precision="ieee"
            )
        groups = outputs * num_groups + first // group_size
        total += part * tl.load(scales_ptr + groups, mask=is_output, other=0.0)[None, :]
        if HAS_OFFSETS:
            offsets = tl.load(offsets_ptr + groups, mask=is_output, other=0.0)
            total -= sums[:, None] * offsets[None, :]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)
        total += bias[None, :]
    places = out_ptr + rows[:, None] * n + outputs[None, :]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _dequantize(
    data_ptr, scales_ptr, offsets_ptr, out_ptr, n, k, row_bytes, group_size, num_groups,
    HAS_OFFSETS: tl.constexpr, BITS: tl.constexpr, IS_FLOAT8: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(1) * TILE
    is_row = rows < n
    data = _codes(data_ptr, rows, is_row, first, row_bytes, TILE, BITS)
    groups = rows * num_groups + first // group_size
    scales = tl.load(scales_ptr + groups, mask=is_row, other=0.0)[:, None]
    offsets = tl.zeros_like(scales)
    if HAS_OFFSETS:
        offsets = tl.load(offsets_ptr + groups, mask=is_row, other=0.0)[:, None]
    dtype = out_ptr.dtype.element_ty
    at = tl.arange(0, TILE * BITS // 8)
    # A unit of 4 bits is four bytes with eight codes: byte j holds codes j and 4 + j.
    columns = first + (at // 4 * 8 + at % 4 if BITS == 4 else at)
    places = out_ptr + rows[:, None] * k
    codes = _values(data & 15 if BITS == 4 else data, IS_FLOAT8)
    inside = is_row[:, None] & (columns < k)[None, :]
    tl.store(places + columns[None, :], (codes * scales - offsets).to(dtype), mask=inside)
    if BITS == 4:
        columns += 4
        codes = (data >> 4).to(tl.float32)
        inside = is_row[:, None] & (columns < k)[None, :]
        tl.store(places + columns[None, :], (codes * scales - offsets).to(dtype), mask=inside)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCodes:
    """A weight [n, k] in few bits on a GPU.

    data: [n, row_bytes], uint8; or int8 whose codes are signed. scales: [n, G] float32. offsets:
    the same; None where all are 0. tile: see tile_size.
    """

    bits: Bits
    k: int
    group_size: int
    tile: int
    data: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    is_float8: bool = False

    def multiplied(
        self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Multiplies few rows, x [T, k] -> [T, n], by the codes; see PackedWeight."""
        n = self.data.shape[0]
        out = x.new_empty(x.shape[0], n, dtype=dtype)
        grid = triton.cdiv(n, TILE_OUTPUTS), triton.cdiv(x.shape[0], TILE_ROWS)
        _few_rows[grid](
            x, x.stride(0), self.data, self.scales, self._offsets, x if bias is None else bias,
            out, x.shape[0], n, self.k, self.data.shape[1], self.group_size, self.scales.shape[1],
            HAS_BIAS=bias is not None, HAS_OFFSETS=self.offsets is not None, BITS=self.bits,
            IS_FLOAT8=self.is_float8, TILE=self.tile, ROWS=TILE_ROWS, OUTPUTS=TILE_OUTPUTS,
            num_warps=4,
        )  # fmt: skip
        return out

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in the order of its codes, [n, k]."""
        n = self.data.shape[0]
        out = torch.empty(n, self.k, dtype=dtype, device=self.data.device)
        grid = triton.cdiv(n, TILE_DEQUANTIZED), triton.cdiv(self.k, self.tile)
        _dequantize[grid](
            self.data, self.scales, self._offsets, out, n, self.k, self.data.shape[1],
            self.group_size, self.scales.shape[1], HAS_OFFSETS=self.offsets is not None,
            BITS=self.bits, IS_FLOAT8=self.is_float8, TILE=self.tile, ROWS=TILE_DEQUANTIZED,
            num_warps=4,
        )  # fmt: skip
        return out

    def rows(self, indices: Tensor) -> DeviceCodes:
        """Returns rows of the weight, by indices [T]."""
        offsets = None if self.offsets is None else self.offsets[indices]
        data, scales = self.data[indices], self.scales[indices]
        return replace(self, data=data, scales=scales, offsets=offsets)

    @property
    def _offsets(self) -> Tensor:
        """A pointer for the kernels, which do not read it without offsets."""
        return self.scales if self.offsets is None else self.offsets


class CudaCodes:
    """A kernels.PackedWeight in few bits on a GPU; products have x as it is."""

    def __init__(self, weight: CodedWeight, device: torch.device) -> None:
        """device: where products are computed; `weight` may be elsewhere."""
        tile = tile_size(weight.bits, weight.group_size, weight.k)
        assert tile is not None
        weight = weight.in_units().with_offsets()
        assert weight.offsets is not None
        self._codes = DeviceCodes(
            bits=weight.bits,
            k=weight.k,
            group_size=min(weight.group_size, -(-weight.k // tile) * tile),
            tile=tile,
            data=weight.units.to(device).view(torch.uint8),
            scales=weight.scales.to(device),
            offsets=None if weight.is_float8 else weight.offsets.to(device),
            is_float8=weight.is_float8,
        )
        self._columns = None if weight.columns is None else weight.columns.to(device)

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]; see PackedWeight."""
        if self._columns is not None:
            x = x[:, self._columns]
        if x.shape[0] <= FEW_ROWS:
            return self._codes.multiplied(x, bias, dtype)
        return plain.linear(x, self._codes.dequantized(x.dtype), bias, dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows, [T] -> [T, k]."""
        found = self._codes.rows(indices).dequantized(dtype)
        if self._columns is None:
            return found
        return torch.empty_like(found).index_copy_(1, self._columns, found)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight in the order of its codes, [n, k]."""
        return self._codes.dequantized(dtype)
