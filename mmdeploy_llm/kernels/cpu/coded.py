"""Matrix products with weights of 4 or 8 bits, see codes.h."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits, CodedWeight, CodeLayout, num_units

from .library import Library
from .scale_words import scale_words

PANEL = 64  # rows of a panel, as in gemm.h
STEP = 16  # groups of columns are multiples of it
ROUNDED_VALUES = 2**20  # of a weight that is rounded at a time
BLOCK_CODES, BLOCK_UNITS = 32, 8  # of a block in stored_codes.h


class CodeForm(IntEnum):
    """How codes of 8 bits lie in memory, as stored_codes.h numbers it."""

    WHOLE = 0
    LISTED = 1
    FIVE = 2
    SIX = 3


WORDS = {CodeForm.LISTED: 4, CodeForm.FIVE: 5, CodeForm.SIX: 6}  # of a block


class Panels(Protocol):
    """A weight [n, k] in panels of codes, see codes.h; its members are fields of LookUpCodes in
    calls.h."""

    n: int
    k: int
    group_size: int
    bits: Bits
    scale_form: int
    code_form: int
    code_list: Tensor | None
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

    def codes_of(self, weight: CodedWeight) -> Tensor | None:
        """Returns the codes that occur in `weight`, [c] uint8, ascending; None where they cannot
        lie in fewer than 8 bits."""
        if weight.bits != 8 or weight.is_float8 or weight.k % BLOCK_CODES:
            return None
        found, codes = torch.zeros(256, dtype=torch.uint8), None
        for units in (weight.units[:PANEL], weight.units):  # most need 8, as a few rows show
            self._library.find_codes(units=units, num=units.nbytes, found=found)
            codes = found.nonzero()[:, 0].to(torch.uint8)
            if _shortest_form(codes) is CodeForm.WHOLE:
                return None
        return codes

    def shortened(
        self, units: Tensor, codes: Tensor | None
    ) -> tuple[CodeForm, Tensor | None, Tensor]:
        """Stores panels of units [P, U, 64] in the shortest form that has all of `codes`. Returns
        the form, its list, [16] uint8, and the panels, [P, W, 64] int32."""
        if codes is None:
            return CodeForm.WHOLE, None, units
        form = _shortest_form(codes)
        places, listed = torch.arange(256).to(torch.uint8), None
        if form is CodeForm.LISTED:
            listed = torch.zeros(16, dtype=torch.uint8)
            listed[: len(codes)] = codes
            places[codes.long()] = torch.arange(len(codes)).to(torch.uint8)
        panels, num_units, _ = units.shape
        num_words = num_units // BLOCK_UNITS * WORDS[form]
        packed = self.memory.empty((panels, num_words, PANEL), dtype=torch.int32)
        self._library.store_codes(
            units=units,
            panels=panels,
            num_units=num_units,
            code_form=form,
            places=places,
            packed=packed,
        )
        return form, listed, packed

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
            code_form=weight.code_form,
            is_float8=weight.is_float8,
            rounds=weight.rounds,
            x=x,
            x_stride=x.stride(0),
            packed=weight.units,
            list=weight.code_list,
            row_bytes=weight.units.nbytes // (weight.units.shape[0] * PANEL),
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
            code_form=weight.code_form,
            is_float8=weight.is_float8,
            is_s8=weight.is_s8,
            ids=indices,
            codes=weight.units,
            list=weight.code_list,
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
    """A kernels.PackedWeight in few bits. scales: those of all groups, as `scale_form` says. units:
    the codes, as `code_form` says. code_list: [16] uint8, the codes of a form that lists them."""

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
        codes = kernels.codes_of(weight)  # before its memory is reused
        units = kernels.pack_units(weight.units, in_words=weight.in_words)
        form, self.code_list, self.units = kernels.shortened(units, codes)
        self.code_form = int(form)

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


def _shortest_form(codes: Tensor) -> CodeForm:
    """Returns the form with the fewest bits that has all of `codes`, ascending."""
    if len(codes) <= 16:
        return CodeForm.LISTED
    largest = int(codes[-1])
    return CodeForm.FIVE if largest < 32 else CodeForm.SIX if largest < 64 else CodeForm.WHOLE
