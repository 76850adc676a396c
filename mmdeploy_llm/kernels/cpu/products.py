"""Matrix products with packed weights, in float32, bf16 and int8. Packed weights lie in panels of
64 rows, with four bytes of each row side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.base import PackedWeight, Quantization
from mmdeploy_llm.kernels.coded import Bits, CodedWeight, layout_of
from mmdeploy_llm.values.options.weight_formats import WeightFormat, rounds_inputs

from .coded import PANEL, ROUNDED_VALUES, CodedProducts

MANY_ROWS, MANY_S8_ROWS = 16, 128  # that the portable level leaves to torch: of floats, of int8
WIDE_VALUES, MIN_WIDE_PANELS = 2**20, 8  # of a wide copy, which should stay in the cache


class Products(CodedProducts):
    """Packs weights and multiplies by them."""

    def can_pack(self, weight: Tensor, quantization: Quantization | None) -> bool:
        """Whether `pack` lays out a weight like this; see Kernels. Unrounded and in float32,
        torch's own products are as fast as ours on processors without wide registers, and need no
        other layout."""
        is_plain = weight.dtype is torch.float32 and quantization is None
        is_ours = self.has_wide_registers or self.has_fixed_order
        return self.takes(weight) and (is_ours or not is_plain)

    def pack(self, weight: Tensor, quantization: Quantization | None) -> PackedWeight | None:
        if not self.can_pack(weight, quantization):
            return None
        if quantization is None:
            return FloatWeight(self, weight)
        own = self.formats[quantization]
        if own.group_size is None:
            return S8Weight(self, weight)
        coded = self.rounded(weight.contiguous(), own)
        return self.pack_coded(coded, rounds=rounds_inputs(quantization))

    def rounded(self, weight: Tensor, weight_format: WeightFormat) -> CodedWeight:
        """Rounds a weight [n, k], contiguous, to codes, and gives its memory back."""
        layout = layout_of(weight_format, weight.shape[1])
        return self.round_codes(weight, layout.bits, layout.group_size, releases=True)

    def pack_float(self, weight: Tensor) -> Tensor:
        """Lays out float32 or bf16 `weight` [n, k], contiguous, k even in bf16, for `linear_float`.
        Reuses the memory of `weight` when n is a multiple of 64, so that a model needs no second
        copy of its weights."""
        packed = self.pack_units(weight.view(torch.int32))
        return packed.view(weight.dtype).view(*packed.shape, -1)

    def linear_float(
        self,
        x: Tensor,
        packed: Tensor,
        n: int,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiplies `x` [T, k] by packed weights of its dtype, float32 or bf16 -> [T, n]. bias:
        [n] of that dtype. dtype: see PackedWeight."""
        assert x.dtype is packed.dtype, f"{x.dtype} times packed {packed.dtype}"
        out = self._empty((x.shape[0], n), dtype=dtype or x.dtype)
        self._library.linear(
            dtype=x.dtype,
            out_dtype=out.dtype,
            x=x,
            x_stride=x.stride(0),
            packed=packed,
            row_bytes=x.shape[1] * x.itemsize,
            bias=bias,
            out=out,
            rows=x.shape[0],
            n=n,
            k=x.shape[1],
        )
        return out

    def linear_wide(
        self,
        x: Tensor,
        packed: Tensor,
        n: int,
        bias: Tensor | None,
        scales: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiplies as `linear_float` does in bf16, or with the `scales` of int8 as `linear_s8`
        does, by torch's float32 product and a wide copy of some panels at a time. Rounds as those
        do, but adds in another order."""
        wide = x.float() if scales is None else self._round_groups(x)
        k, (_, num_units, _, unit) = x.shape[1], packed.shape
        out = torch.empty(x.shape[0], n)
        step = max(MIN_WIDE_PANELS, WIDE_VALUES // (PANEL * k))
        for first in range(0, len(packed), step):
            panels = packed[first : first + step]
            weight = torch.empty(num_units * unit, len(panels) * PANEL)
            self._library.widen_panels(
                unit_values=unit, packed=panels, panels=len(panels), units=num_units, out=weight
            )
            columns = out[:, first * PANEL : first * PANEL + weight.shape[1]]
            torch.mm(wide, weight[:k, : columns.shape[1]], out=columns)
        if scales is not None:
            own, shifts = scales
            out.mul_(own).addr_(wide.sum(1), shifts)
        return (out if bias is None else out.add_(bias)).to(dtype or x.dtype)

    def _round_groups(self, x: Tensor) -> Tensor:
        """Returns x [T, k] in float32, rotated and rounded as `linear_s8` does."""
        out = torch.empty(x.shape)
        self._library.round_groups(
            dtype=x.dtype, x=x, x_stride=x.stride(0), rows=x.shape[0], k=x.shape[1], out=out
        )
        return out

    def look_up(self, weight: Tensor, indices: Tensor) -> Tensor:
        if not self.takes_whole(weight):
            return super().look_up(weight, indices)
        return self._look_up(weight, weight.shape, 1, indices)

    def replace_id(self, indices: Tensor, old: int, new: int) -> Tensor:
        if not indices.is_cpu:
            return super().replace_id(indices, old, new)
        assert indices.is_contiguous()
        out = self._empty(indices.shape, dtype=indices.dtype)
        self._library.replace_id(
            ids=indices, **{"from": old}, to=new, out=out, tokens=indices.shape[0]
        )
        return out

    def look_up_packed(self, packed: Tensor, n: int, indices: Tensor) -> Tensor:
        """Returns rows of the weight [n, k] that `pack_float` laid out, [T] -> [T, k]."""
        _, num_units, panel, unit = packed.shape
        return self._look_up(packed, (n, num_units * unit), panel, indices)

    def _look_up(
        self, weights: Tensor, shape: Sequence[int], panel: int, indices: Tensor
    ) -> Tensor:
        assert indices.dtype is torch.int64
        assert indices.is_contiguous()
        n, k = shape
        out = self._empty((indices.shape[0], k), dtype=weights.dtype)
        self._library.look_up(
            ids=indices,
            weights=weights,
            n=n,
            row_bytes=k * weights.itemsize,
            panel=panel,
            out=out,
            tokens=indices.shape[0],
        )
        return out

    def pack_s8(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Lays out int8 `weight` [n, k], contiguous, for `linear_s8`. out: where to; None: memory
        of its own."""
        if weight.shape[1] % 4:
            weight = F.pad(weight, (0, -weight.shape[1] % 4))
        n, k = weight.shape
        packed = self._empty_panels(n, k) if out is None else out
        self._library.pack_s8(weights=weight, n=n, k=k, packed=packed)
        return packed

    def rounded_panels(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates and rounds `weight` [n, k], contiguous, and lays it out: the panels and the
        scales of `linear_s8`. A bounded number of rows at a time, whose memory is given back, so
        that no second copy is made."""
        step = max(1, ROUNDED_VALUES // (PANEL * weight.shape[1])) * PANEL
        panels, scales = self._empty_panels(*weight.shape), torch.empty(2, len(weight))
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            codes, scales[:, rows] = self.quantize_rows(self.rotated(weight[rows]))
            self.pack_s8(codes, panels[first // PANEL :])
            self.memory.release(weight[rows])
        return panels, scales

    def rotated(self, x: Tensor, *, is_back: bool = False) -> Tensor:
        """Returns x [T, k], contiguous, in float32, each whole group of 64 columns rotated as
        `linear_s8` rotates it: half of the values with the other sign, then multiplied by a
        Hadamard matrix. is_back: undoes that, but for rounding."""
        assert x.is_contiguous()
        out = torch.empty(x.shape)
        rows, k = x.shape
        self._library.rotate_groups(dtype=x.dtype, x=x, rows=rows, k=k, is_back=is_back, out=out)
        return out

    def _empty_panels(self, n: int, k: int) -> Tensor:
        return self.memory.empty((-(-n // PANEL), -(-k // 4), PANEL, 4), dtype=torch.uint8)

    def quantize_rows(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rounds `weight` [n, k], contiguous, to int8 [n, k] with scales [2, n] float32, the
        scale and the shift of each row: weight = scale * rounded + shift. The range of a row and 0
        becomes that of int8, and 0 stays 0."""
        n, k = weight.shape
        rounded = torch.empty(n, k, dtype=torch.int8)
        scales = torch.empty(2, n)
        self._library.quantize_rows(
            dtype=weight.dtype, weights=weight, n=n, k=k, out=rounded, scales=scales
        )
        return rounded, scales

    def linear_s8(
        self,
        x: Tensor,
        packed: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiplies `x` [T, k], rotated as `rotated` does and quantised with a scale for every 64
        values of a row, by packed weights that were rotated too -> [T, n]. scales: see
        quantize_rows, contiguous. bias: [n] of x's dtype. dtype: see PackedWeight."""
        assert scales.is_contiguous()
        out = self._empty((x.shape[0], scales.shape[1]), dtype=dtype or x.dtype)
        self._library.linear_s8(
            dtype=x.dtype,
            out_dtype=out.dtype,
            x=x,
            x_stride=x.stride(0),
            packed=packed,
            row_bytes=x.shape[1],
            scales=scales,
            bias=bias,
            out=out,
            rows=x.shape[0],
            n=scales.shape[1],
            k=x.shape[1],
        )
        return out


class FloatWeight:
    """A kernels.PackedWeight with its values unchanged, in float32 or bf16."""

    def __init__(self, kernels: Products, weight: Tensor) -> None:
        """weight: [n, k]; its memory is reused."""
        self._kernels = kernels
        self._num_rows, self._k = weight.shape
        self._padding = self._k % (4 // weight.itemsize)  # columns of zeros that fill a unit
        if self._padding:
            weight = F.pad(weight, (0, self._padding))
        self._panels = kernels.pack_float(weight.contiguous())  # [n / 64, k / unit, 64, unit]

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies x [T, k] of the weight's dtype -> [T, n]; see PackedWeight."""
        if self._padding:
            x = F.pad(x, (0, self._padding))
        is_bf16 = x.dtype is torch.bfloat16
        if is_bf16 and x.shape[0] >= MANY_ROWS and self._kernels.leaves_many_rows_to_torch:
            return self._kernels.linear_wide(x, self._panels, self._num_rows, bias, dtype=dtype)
        return self._kernels.linear_float(x, self._panels, self._num_rows, bias, dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows, [T] -> [T, k]. dtype: that of the weight."""
        assert dtype is self._panels.dtype
        rows = self._kernels.look_up_packed(self._panels, self._num_rows, indices)
        return rows[:, : self._k] if self._padding else rows


class S8Weight:
    """A kernels.PackedWeight in int8 with a scale and a zero for each row; x is rounded to int8
    too, with a scale for every 64 values of a row, whose largest magnitude becomes 127. Every 64
    columns of both are rotated first: the product stays as it is, and a value that is far from the
    others costs them less."""

    bits: Bits = 8
    scale_form, code_form, is_float8, is_s8 = 0, 0, False, True
    code_list: Tensor | None = None

    def __init__(self, kernels: Products, weight: Tensor) -> None:
        """weight: [n, k] float32 or bf16."""
        self._kernels = kernels
        self.n, self.k = weight.shape
        self.group_size = self.k
        self.units, self.scales = kernels.rounded_panels(weight.contiguous())

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]; see PackedWeight."""
        if x.shape[0] >= MANY_S8_ROWS and self._kernels.leaves_many_rows_to_torch:
            return self._kernels.linear_wide(x, self.units, self.n, bias, self.scales, dtype)
        return self._kernels.linear_s8(x, self.units, self.scales, bias, dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows, [T] -> [T, k]."""
        rows = self._kernels.look_up_codes(self, indices, torch.float32)
        return self._kernels.rotated(rows, is_back=True).to(dtype)
