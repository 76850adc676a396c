"""CodedWeight: a matrix in 4 or 8 bits, as the kernels and the readers of checkpoints exchange it.

Groups of columns of a row share a scale and an offset:

    weight = scale * code - offset        codes: 0 .. 15, or 0 .. 255, or floats of 8 bits (e4m3fn)

An offset is scale * zero where the code of zero is an integer, as in most formats.

Shapes: n rows (outputs), k columns (inputs), G groups of a row, U units of a row. A unit is four
bytes: 4 codes of 8 bits, or 8 codes of 4 bits, of which byte j holds code j below code 4 + j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.values.options.weight_formats import WeightFormat

Bits = Literal[4, 8]
UNIT_BYTES = 4
NAN = 0x7F  # of 8-bit floats, beside the sign
BLOCK_UNITS = 2**18  # that are looked at at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeLayout:
    """How a weight is cut into codes: bits of a code, and columns of a group.

    is_float8: whether codes are 8-bit floats, torch.float8_e4m3fn.
    order: the columns in the order of their codes, as the bytes of int64; empty where both have one
        order. Checkpoints that were rounded column by column, the most important first, have one.
    """

    bits: Bits
    group_size: int
    is_float8: bool = False
    order: bytes = b""

    @property
    def columns(self) -> Tensor | None:
        """The column of each code, [k] int64; None without an order."""
        return torch.frombuffer(bytearray(self.order), dtype=torch.int64) if self.order else None

    def can_cut(self, k: int, first: int, stop: int) -> bool:
        """Whether columns `first` .. `stop` of k are whole units and whole groups."""
        codes = 8 * UNIT_BYTES // self.bits
        sizes = (codes, codes if self.group_size >= k else self.group_size)
        ends = [at for at in (first, stop) if at != k]
        return not self.order and all(at % size == 0 for at in ends for size in sizes)


def layout_of(weight_format: WeightFormat, k: int) -> CodeLayout:
    """Returns how rows of k values are cut into codes; one that is shorter than a group is one."""
    size = k if weight_format.group_size is None else min(weight_format.group_size, k)
    return CodeLayout(bits=weight_format.bits, group_size=size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedWeight:
    """A weight [n, k] in few bits.

    group_size: columns of a group; the last group of a row may be shorter.
    units: [n, U] int32, contiguous.
    in_words: whether units of 4 bits are as most files store them, with the first of their eight
        codes in the lowest bits: the kernels rearrange them while they lay them out.
    scales: [n, G] float32.
    offsets: [n, G] float32; None where `zeros` says them.
    zeros: [n, G] uint8, the codes of zero; None with offsets.
    columns: [k] int64, the column of each code; None where codes have the order of columns.
    is_float8: see CodeLayout.
    """

    bits: Bits
    k: int
    group_size: int
    units: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    zeros: Tensor | None = None
    in_words: bool = False
    columns: Tensor | None = None
    is_float8: bool = False

    def __post_init__(self) -> None:
        assert (self.offsets is None) is not (self.zeros is None)
        assert self.units.dtype is torch.int32
        assert self.units.shape[1] == num_units(self.k, self.bits)
        assert self.bits == 8 or not self.is_float8

    @property
    def n(self) -> int:
        """The number of rows."""
        return self.units.shape[0]

    def in_units(self) -> CodedWeight:
        """Returns the same weight with codes as the kernels exchange them, not `in_words`."""
        if not self.in_words:
            return self
        return replace(self, units=units_of_words(self.units), in_words=False)

    @property
    def num_bytes(self) -> int:
        """The memory of all parts."""
        parts = (self.units, self.scales, self.offsets, self.zeros)
        return sum(part.nbytes for part in parts if part is not None)

    def has_nan(self) -> bool:
        """Whether a code is an 8-bit float that is no number."""
        if not self.is_float8:
            return False
        blocks = torch.split(self.units, max(1, BLOCK_UNITS // self.units.shape[1]))
        return any(bool((own.view(torch.uint8) & NAN == NAN).any()) for own in blocks)

    def codes(self) -> Tensor:
        """Returns the codes, [n, k] uint8."""
        data = self.in_units().units.view(torch.uint8)
        if self.bits == 4:
            quads = data.view(self.n, -1, UNIT_BYTES)
            data = torch.cat([quads & 15, quads >> 4], -1).view(self.n, -1)
        return data[:, : self.k]

    def dequantize(self) -> Tensor:
        """Returns the weight, [n, k] float32: scale * (code - zero) in one rounding, or scale *
        code - offset in two."""
        codes = self.codes()
        codes = (codes.view(torch.float8_e4m3fn) if self.is_float8 else codes).float()
        scales = self._spread(self.scales)
        if self.zeros is not None:
            values = (codes - self._spread(self.zeros.float())) * scales
        else:
            assert self.offsets is not None
            values = codes * scales - self._spread(self.offsets)
        return values if self.columns is None else values[:, self.columns.argsort()]

    def with_offsets(self) -> CodedWeight:
        """Returns the same weight with offsets for zeros."""
        if self.zeros is None:
            return self
        return replace(self, offsets=self.scales * self.zeros, zeros=None)

    @property
    def layout(self) -> CodeLayout:
        """The bits, groups and order of the codes."""
        order = b"" if self.columns is None else self.columns.numpy().tobytes()
        return CodeLayout(
            bits=self.bits, group_size=self.group_size, is_float8=self.is_float8, order=order
        )

    def rows(self, rows: slice | Tensor) -> CodedWeight:
        """Returns some rows; those of a slice are in the same memory. rows: int64 if a tensor."""
        return replace(self, units=self.units[rows], **self._ranges_at(rows))

    def cut(self, first: int, stop: int) -> CodedWeight:
        """Returns columns `first` .. `stop`, which CodeLayout.can_cut allows."""
        assert self.layout.can_cut(self.k, first, stop)
        begin = first * self.bits // (8 * UNIT_BYTES)
        end = begin + num_units(stop - first, self.bits)
        groups = slice(first // self.group_size, -(-stop // self.group_size))
        return replace(
            self,
            k=stop - first,
            units=self.units[:, begin:end].contiguous(),
            **self._ranges_at((slice(None), groups)),
        )

    def recoded(self, layout: CodeLayout) -> CodedWeight:
        """Returns the same weight with codes of as many bits or more, and in groups of a size that
        divides its own. Its codes keep their order, and are floats only if they were."""
        if layout == self.layout:
            return self
        assert layout.is_float8 is self.is_float8
        starts = torch.arange(0, self.k, layout.group_size) // self.group_size
        return replace(
            self,
            bits=layout.bits,
            group_size=layout.group_size,
            units=units_of(self.codes(), layout.bits),
            in_words=False,
            **self._ranges_at((slice(None), starts)),
        )

    def split(self, num: int) -> list[CodedWeight]:
        """Returns `num` equal runs of rows, in the same memory."""
        size = self.n // num
        return [self.rows(slice(start, start + size)) for start in range(0, self.n, size)]

    def _ranges_at(self, index: Any) -> dict[str, Any]:
        """Returns scales, offsets and zeros, indexed."""
        ranges = {"scales": self.scales, "offsets": self.offsets, "zeros": self.zeros}
        return {name: None if own is None else own[index] for name, own in ranges.items()}

    def _spread(self, groups: Tensor) -> Tensor:
        return groups.repeat_interleave(self.group_size, 1)[:, : self.k]


def joined(parts: Sequence[CodedWeight], units: Tensor) -> CodedWeight:
    """Returns weights of as many columns and one order, one below the other, with the most bits and
    the smallest groups that one of them needs. units: [n, U] int32 to write the units into, those
    of all parts; a part whose units are there already is not copied."""
    layout = common_layout([part.layout for part in parts])
    parts = [part.recoded(layout) for part in parts]
    if any(part.zeros is None for part in parts):
        parts = [part.with_offsets() for part in parts]
    in_words = all(part.in_words for part in parts)
    places = torch.split(units, [part.n for part in parts])
    for part, place in zip(parts, places, strict=True):
        if part.in_words and not in_words:
            place.copy_(units_of_words(part.units))
        elif part.units.data_ptr() != place.data_ptr():
            place.copy_(part.units)

    def stacked(name: str) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    scales = stacked("scales")
    assert scales is not None
    return replace(
        parts[0],
        units=units,
        in_words=in_words,
        scales=scales,
        offsets=stacked("offsets"),
        zeros=stacked("zeros"),
    )


def common_layout(layouts: Sequence[CodeLayout]) -> CodeLayout:
    """Returns the layout in which weights of all these layouts, which have one order and are all
    floats or none, can be written: the most bits, and the largest groups that divide those of
    each."""
    return CodeLayout(
        bits=8 if any(layout.bits == 8 for layout in layouts) else 4,
        group_size=math.gcd(*(layout.group_size for layout in layouts)),
        is_float8=layouts[0].is_float8,
        order=layouts[0].order,
    )


def num_units(k: int, bits: Bits) -> int:
    """Returns the units that k codes take."""
    return -(-k * bits // (8 * UNIT_BYTES))


def units_of(codes: Tensor, bits: Bits) -> Tensor:
    """Returns codes [n, k] uint8 as units [n, U] int32; codes that fill the last unit are 0."""
    n, k = codes.shape
    padded = F.pad(codes, (0, num_units(k, bits) * UNIT_BYTES * 8 // bits - k))
    if bits == 4:
        low, high = padded.view(n, -1, 2, UNIT_BYTES).unbind(2)
        padded = (low | (high << 4)).view(n, -1)
    return padded.contiguous().view(torch.int32)


def units_of_words(words: Tensor) -> Tensor:
    """Returns codes of 4 bits, int32 [n, U] with the first of its eight in the lowest bits of each
    word, as units [n, U]."""
    return _apart(words & 0xFFFF) | (_apart((words >> 16) & 0xFFFF) << 4)


def _apart(words: Tensor) -> Tensor:
    """Moves the four codes in the lower half of each word to the lower halves of its bytes."""
    words = (words | (words << 8)) & 0x00FF00FF
    return (words | (words << 4)) & 0x0F0F0F0F
