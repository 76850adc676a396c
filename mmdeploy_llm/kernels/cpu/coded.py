"""Matrix products with weights of 4 or 8 bits, see codes.h."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits, CodedWeight, CodeLayout, num_units

from .library import Library
from .scale_words import scale_words

PANEL = 64  # rows of a panel, as in gemm.h
STEP = 16  # groups of columns are multiples of it
ROUNDED_VALUES = 2**20  # of a weight that is rounded at a time


class Panels(Protocol):
    """A weight [n, k] in panels of codes, see codes.h; its members are fields of LookUpCodes in
    calls.h."""

    n: int
    k: int
    group_size: int
    bits: Bits
    scale_form: int
    is_float8: bool
    is_s8: bool
    units: Tensor
    scales: Tensor


class CodedProducts(Library):
    """Packs weights of few bits, rounds weights to them, and multiplies by them."""

    def can_pack_coded(self, layout: CodeLayout, shape: Sequence[int]) -> bool:
        return layout.group_size % STEP == 0 or layout.group_size >= shape[-1]

    def pack_coded(self, weight: CodedWeight, *, rounds: bool) -> CodedPanels:
        """Lays `weight` out for products; see Kernels. The memory of its units and scales is reused
        where n is a multiple of 64."""
        return CodedPanels(self, weight, rounds=rounds)

    def pack_units(self, units: Tensor, *, in_words: bool = False) -> Tensor:
        """Lays out units [n, U] int32, contiguous, as panels [n / 64, U, 64]. Reuses their memory
        where n is a multiple of 64. in_words: see CodedWeight."""
        n, num = units.shape
        shape = (-(-n // PANEL), num, PANEL)
        packed = self.memory.empty(shape, dtype=torch.int32) if n % PANEL else units.view(shape)
        self._library.pack_units(weights=units, n=n, units=num, in_words=in_words, packed=packed)
        return packed

    def round_codes(
        self, weight: Tensor, bits: Bits, group_size: int, *, releases: bool = False
    ) -> CodedWeight:
        """Rounds `weight` [n, k], float32 or bf16, contiguous, to codes with integer zeros. Scales
        have the precision of bf16. In 4 bits each group's range is cut where that makes the sum of
        its squared errors smaller: to 1, 0.95, ... 0.75 of its smallest and largest value.
        releases: whether the memory of `weight` is given back meanwhile."""
        n, k = weight.shape
        num_groups = -(-k // group_size)
        units = self.memory.empty((n, num_units(k, bits)), dtype=torch.int32)
        scales, zeros = torch.empty(n, num_groups), torch.empty(n, num_groups, dtype=torch.uint8)
        for start in range(0, n, step := max(1, ROUNDED_VALUES // k)):
            rows = slice(start, start + step)
            part = weight[rows]
            self._library.round_codes(
                dtype=weight.dtype,
                weights=part,
                n=len(part),
                k=k,
                bits=bits,
                group=group_size,
                units=units[rows],
                scales=scales[rows],
                zeros=zeros[rows],
            )
            if releases:
                self.memory.release(part)
        return CodedWeight(
            bits=bits, k=k, group_size=group_size, units=units, scales=scales, zeros=zeros
        )

    def linear_codes(
        self,
        x: Tensor,
        weight: CodedPanels,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Multiplies `x` [T, k] -> [T, n]. bias: [n] of x's dtype. dtype: see PackedWeight."""
        assert x.shape[1] == weight.k, f"rows of {x.shape[1]} values times {weight.k} columns"
        out = self._empty((x.shape[0], weight.n), dtype=dtype or x.dtype)
        self._library.linear_codes(
            dtype=x.dtype,
            out_dtype=out.dtype,
            bits=weight.bits,
            scale_form=weight.scale_form,
            is_float8=weight.is_float8,
            rounds=weight.rounds,
            x=x,
            x_stride=x.stride(0),
            packed=weight.units,
            row_bytes=weight.k * weight.bits // 8,
            scales=weight.scales,
            group=weight.group_size,
            bias=bias,
            out=out,
            rows=x.shape[0],
            n=weight.n,
            k=weight.k,
        )
        return out

    def look_up_codes(self, weight: Panels, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns rows of `weight`, dequantised, by indices [T] int64, contiguous: [T, k]. A row
        that it does not have is NaN."""
        assert indices.dtype is torch.int64
        assert indices.is_contiguous()
        out = self._empty((indices.shape[0], weight.k), dtype=dtype)
        self._library.look_up_codes(
            dtype=dtype,
            bits=weight.bits,
            scale_form=weight.scale_form,
            is_float8=weight.is_float8,
            is_s8=weight.is_s8,
            ids=indices,
            codes=weight.units,
            scales=weight.scales,
            group=weight.group_size,
            n=weight.n,
            k=weight.k,
            out=out,
            tokens=indices.shape[0],
        )
        return out

    def take_columns(self, x: Tensor, columns: Tensor) -> Tensor:
        """Returns values `columns`, [k] int64 on the CPU, of each row of x [T, k]."""
        assert columns.is_contiguous()
        out = self._empty(x.shape, dtype=x.dtype)
        self._library.take_columns(
            dtype=x.dtype,
            columns=columns,
            x=x,
            x_stride=x.stride(0),
            out=out,
            rows=x.shape[0],
            size=x.shape[1],
        )
        return out


class CodedPanels:
    """A kernels.PackedWeight in few bits. scales: those of all groups, as `scale_form` says."""

    is_s8 = False

    def __init__(self, kernels: CodedProducts, weight: CodedWeight, *, rounds: bool) -> None:
        assert not (rounds and weight.is_float8)
        self._kernels = kernels
        self.n, self.k, self.group_size = weight.n, weight.k, weight.group_size
        self._columns = weight.columns
        self._places = None if weight.columns is None else weight.columns.argsort()
        self.bits, self.is_float8, self.rounds = weight.bits, weight.is_float8, rounds
        self.scale_form, words = scale_words(weight)
        self.scales = kernels.pack_units(words)
        self.units = kernels.pack_units(weight.units, in_words=weight.in_words)

    @property
    def num_bytes(self) -> int:
        """The memory of codes and scales."""
        return self.units.nbytes + self.scales.nbytes

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiplies x [T, k] -> [T, n]; see PackedWeight. Brings its values into the order of the
        codes before."""
        if self._columns is not None:
            x = self._kernels.take_columns(x, self._columns)
        return self._kernels.linear_codes(x, self, bias, dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Looks up rows, [T] -> [T, k]."""
        found = self._kernels.look_up_codes(self, indices, dtype)
        return found if self._places is None else self._kernels.take_columns(found, self._places)
