"""QuantizedLayer: the tensors that hold one quantised weight, and how they are read. Shapes: n rows
(outputs), k columns (inputs), G groups of columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits, CodedWeight, CodeLayout, units_of
from mmdeploy_llm.weights.tensor_file import WeightRows

# The 16 values of a 4-bit float with 2 bits of exponent and 1 of mantissa (OCP MX 1.0, E2M1).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
WORD = 32


def unpack_words(words: Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpacks int32 words [r, c], each of 32 / num_bits values, lowest bits first: uint8
    [r, c * 32 / num_bits]. num_bits: 2, 4 or 8. order: the position in its word of each value that
    follows; None: ascending."""
    per_word = WORD // num_bits
    shifts = torch.arange(0, WORD, num_bits, dtype=torch.int32)
    if order is not None:
        shifts = shifts[list(order)]
    out = torch.empty(*words.shape, per_word, dtype=torch.uint8)
    for index, shift in enumerate(shifts.tolist()):
        out[..., index] = (words >> shift) & (2**num_bits - 1)
    return out.flatten(-2)


def unpack_dense(words: Tensor, num_bits: int, count: int) -> Tensor:
    """Unpacks int32 words [r, c] with values of num_bits bits that may cross the words: uint8
    [r, count]. num_bits: 1 to 8."""
    if WORD % num_bits == 0:
        return unpack_words(words, num_bits)[:, :count]
    starts = torch.arange(count) * num_bits
    index, shift = starts // WORD, starts % WORD
    wide: Tensor = words.long() & 0xFFFF_FFFF
    wide = torch.cat([wide, wide.new_zeros(wide.shape[0], 1)], 1)
    both = wide[:, index] | (wide[:, index + 1] << WORD)
    out: Tensor = ((both >> shift) & (2**num_bits - 1)).to(torch.uint8)
    return out


def unpack_nibbles(octets: Tensor) -> Tensor:
    """Unpacks two 4-bit values from each uint8 [..., c], the lower one first: uint8 [..., 2 c]."""
    return torch.stack((octets & 0xF, octets >> 4), -1).flatten(-2)


def float4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of 4-bit floats."""
    return torch.tensor(E2M1, dtype=dtype)[codes.int()]


def power_of_two(exponents: Tensor) -> Tensor:
    """Returns the float32 values of 8-bit exponents with a bias of 127 (OCP MX 1.0, E8M0)."""
    values: Tensor = torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
    return values


SMALLEST_BYTE = -128
MAX_ZERO = 255  # a CodedWeight keeps codes of zero in 8 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """One weight of a checkpoint that is stored quantised.

    name: the layer, for messages. key: the name under which the weight appears.
    parts: keys of the stored tensors, by the role that `decode` knows them by.
    shape, dtype: of the dequantised weight.
    decode: makes the weight of the stored tensors, by role: a tensor of floats, or an object whose
        `rows` are dequantised when they are asked for. Called once for each use of the weight, in
        several threads; it keeps nothing.
    layout: of the codes if the weight may stay in few bits; `decode` then returns a GroupedMatrix.
        None where its values are neither integers nor 8-bit floats, or where its groups are no runs
        of columns in any order.
    """

    name: str
    key: str
    parts: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    decode: Callable[[Mapping[str, Tensor]], WeightRows | Tensor]
    layout: CodeLayout | None = None


def integer_layout(
    num_bits: int, group_size: int, group_of: Tensor | None = None
) -> CodeLayout | None:
    """Returns the layout of integers of 1 to 8 bits. group_of: [k], the group of each column, if
    groups are no runs of columns; sorted by it they must be, else the result is None."""
    bits: Bits = 4 if num_bits <= 4 else 8
    if group_of is None:
        return CodeLayout(bits=bits, group_size=group_size)
    columns = group_of.argsort(stable=True)
    if not torch.equal(group_of[columns].long(), torch.arange(len(columns)) // group_size):
        return None
    return CodeLayout(bits=bits, group_size=group_size, order=columns.numpy().tobytes())


@dataclass(frozen=True, slots=True)
class PackedNibbles:
    """Codes [n, k] from 0 to 15, eight in each word of [n, k / 8 (rounded up)] int32, the first one
    in its lowest bits. Rows are unpacked when they are asked for."""

    words: Tensor
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the codes."""
        return self.words.shape[0], self.k

    def __getitem__(self, rows: slice) -> Tensor:
        """Returns the codes of some rows, uint8."""
        return unpack_words(self.words[rows], 4)[:, : self.k]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatrix:
    """A matrix of small numbers that share scales: (codes - zeros) * scales, computed in `dtype`.

    codes: [n, k], integers or 8-bit floats, or PackedNibbles.
    scales: [n / block_rows (rounded up), G]. zeros: the same shape; None: all are 0.
    group_of: [k] int64, the group of each column; None: G equal runs of group_size columns, the
        last one perhaps shorter.
    """

    codes: Tensor | PackedNibbles
    scales: Tensor
    group_size: int
    dtype: torch.dtype
    zeros: Tensor | None = None
    group_of: Tensor | None = None
    block_rows: int = 1

    def rows(self, start: int, end: int) -> Tensor:
        """See WeightRows."""
        values = self.codes[start:end].to(self.dtype)
        if self.zeros is not None:
            values = values - self._spread(self.zeros.to(self.dtype), start, end)
        return values * self._spread(self.scales.to(self.dtype), start, end)

    def coded(self, layout: CodeLayout) -> CodedWeight:
        """Returns the matrix in few bits, which `layout` must fit; its groups must be runs of
        columns in its order. Of integers the smallest signed byte becomes code 0."""
        assert (self.group_of is None) is not bool(layout.order)
        zero, columns = 0, layout.columns
        in_words = columns is None and isinstance(self.codes, PackedNibbles)
        if columns is not None:
            codes = self.codes[: self.codes.shape[0]]
            assert codes.dtype is torch.uint8
            units = units_of(codes[:, columns], layout.bits)
        elif isinstance(self.codes, PackedNibbles):
            units = self.codes.words
        elif self.codes.dtype is torch.int8:
            zero = -SMALLEST_BYTE
            units = units_of((self.codes.to(torch.int16) + zero).to(torch.uint8), layout.bits)
        else:
            units = units_of(self.codes.view(torch.uint8), layout.bits)
        scales = self._of_rows(self.scales).float().contiguous()
        zeros = torch.full(scales.shape, zero, dtype=torch.int32)
        if self.zeros is not None:
            zeros += self._of_rows(self.zeros)
        fits = int(zeros.min()) >= 0 and int(zeros.max()) <= MAX_ZERO
        return CodedWeight(
            bits=layout.bits,
            k=self.codes.shape[1],
            group_size=layout.group_size,
            units=units,
            in_words=in_words,
            scales=scales,
            offsets=None if fits else scales * zeros,
            zeros=zeros.to(torch.uint8) if fits else None,
            columns=columns,
            is_float8=layout.is_float8,
        )

    def _of_rows(self, values: Tensor) -> Tensor:
        """Repeats one value of each block of rows for these: [n, G]."""
        return values.repeat_interleave(self.block_rows, 0)[: self.codes.shape[0]]

    def _spread(self, values: Tensor, start: int, end: int) -> Tensor:
        """Repeats one value of each group for its rows start .. end and its columns: [end - start,
        k]."""
        if self.block_rows > 1:
            first = start // self.block_rows
            values = values[first : -(-end // self.block_rows)]
            values = values.repeat_interleave(self.block_rows, 0)
            skipped = start - first * self.block_rows
            values = values[skipped : skipped + end - start]
        else:
            values = values[start:end]
        if self.group_of is not None:
            return values[:, self.group_of]
        return values.repeat_interleave(self.group_size, 1)[:, : self.codes.shape[1]]
