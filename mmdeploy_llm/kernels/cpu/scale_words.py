"""The words of scales that a weight in few bits has beside its codes, see code_scales.h."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.coded import CodedWeight

ZEROS, OFFSETS, SHORT_ZEROS, SHORT, PAIRS, BLOCKS, BLOCK_ZEROS = range(7)  # forms
ZERO_BITS = 8  # the lowest ones of a word, where these are free; and of a form
EXPONENTS = 31  # of a short scale
MANTISSA_BITS = 23  # of a float
BLOCK = 8  # groups that have a factor in common
MIN_BLOCK_GROUPS = 3  # of a row, from which on blocks take less memory
SAMPLE = 64  # blocks that are looked at before all of them
MAX_FACTOR = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    """A form of scales in half a word: their bits of mantissa, and the least scale but 0."""

    mantissa: int
    least: float

    def holds(self, scales: Tensor) -> Tensor:
        """Returns which scales have this form."""
        size, least = scales.abs(), self.least
        is_within = (size >= least) & (size < least * 2**EXPONENTS)
        lost = (1 << (MANTISSA_BITS - self.mantissa)) - 1
        is_short: Tensor = size.view(torch.int32) & lost == 0
        return (size == 0).logical_or_(is_within & is_short)

    def bits(self, scales: Tensor) -> Tensor:
        """Returns the magnitudes of scales that have this form, int32."""
        moved = scales.abs() * (2.0**-126 / self.least)  # 2^-126 has the exponent 1
        return moved.view(torch.int32) >> (MANTISSA_BITS - self.mantissa)

    def signed(self, scales: Tensor) -> Tensor:
        """Returns these with their signs, in the lower half of int32."""
        return self.bits(scales) | scales.view(torch.int32) >> 16 & 0x8000


WITH_ZERO, ALONE = _Short(mantissa=7, least=2.0**-28), _Short(mantissa=10, least=2.0**-24)


def scale_words(weight: CodedWeight) -> tuple[int, Tensor]:
    """Returns the form of a weight's scales, plus 256 times the zero of all groups where that has
    none of its own, and the words [n, W] int32 of each row: the least that holds them exactly. The
    memory of scales may be reused."""
    weight = replace(weight, scales=weight.scales.contiguous())  # those of some columns are a view
    for form, words in (*_with_one_zero(weight), *_with_zeros(weight)):
        return form, words
    offsets = weight.with_offsets().offsets
    assert offsets is not None
    return _with_offsets(weight.scales, offsets.contiguous())


def _with_one_zero(weight: CodedWeight) -> Iterator[tuple[int, Tensor]]:
    """Yields what holds scales of groups that have one zero."""
    if weight.zeros is None or not weight.zeros.numel():
        return
    zero = int(weight.zeros.flatten()[0])
    if not (weight.zeros == zero).all():
        return
    if ALONE.holds(weight.scales).all():
        yield SHORT | zero << ZERO_BITS, _gathered(ALONE.signed(weight.scales), 16)
    elif (found := _factored(weight.scales)) is not None:
        bases, factors = found
        words = _gathered(factors & 0xFF, 8)
        yield BLOCK_ZEROS | zero << ZERO_BITS, _in_blocks(ALONE.signed(bases), words, 2)


def _with_zeros(weight: CodedWeight) -> Iterator[tuple[int, Tensor]]:
    """Yields what holds scales and zeros."""
    scales, zeros = weight.scales, weight.zeros
    if zeros is None:
        return
    if (
        weight.bits == 4
        and WITH_ZERO.holds(scales).all()
        and zeros.max() <= 15
        and (scales >= 0).all()
    ):
        yield SHORT_ZEROS, _gathered(WITH_ZERO.bits(scales) << 4 | zeros, 16)
    elif zeros_fit(scales):
        yield ZEROS, scales.view(torch.int32).bitwise_or_(zeros)


def _with_offsets(scales: Tensor, offsets: Tensor) -> tuple[int, Tensor]:
    if ALONE.holds(scales).all() and ALONE.holds(offsets).all():
        return PAIRS, ALONE.signed(scales) | ALONE.signed(offsets) << 16
    found = _factored(scales)
    own = None if found is None else _factored(offsets)
    if found is None or own is None:
        return OFFSETS, torch.stack([scales, offsets], -1).view(torch.int32).flatten(1)
    (bases, factors), (own_bases, own_factors) = found, own
    heads = ALONE.signed(bases) | ALONE.signed(own_bases) << 16
    words = _gathered(factors & 0xFF | (own_factors & 0xFF) << 8, 16)
    return BLOCKS, _in_blocks(heads, words, 4)


def _gathered(values: Tensor, bits: int) -> Tensor:
    """Puts values [n, G] of so many bits into words, the first one in the lowest bits."""
    num = 32 // bits
    parts = F.pad(values, (0, -values.shape[1] % num)).view(len(values), -1, num)
    words = parts[..., 0]
    for i in range(1, num):
        words = words | parts[..., i] << (bits * i)
    return words


def _in_blocks(heads: Tensor, words: Tensor, size: int) -> Tensor:
    """Puts the head of each block, [n, B], before its words, of which a whole block has `size`."""
    (n, num), used = heads.shape, words.shape[1]
    parts = F.pad(words, (0, num * size - used)).view(n, num, size)
    return torch.cat([heads[..., None], parts], -1).flatten(1)[:, : num + used].contiguous()


def _factored(values: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns what the values of each block have in common, [n, B] in a form of half a word, and
    integers [n, G] of 8 bits that times it are exactly the values; None if there are none."""
    n, num = values.shape
    if num < MIN_BLOCK_GROUPS:
        return None
    parts = F.pad(values, (0, -num % BLOCK)).view(-1, BLOCK).T.contiguous()
    if _bases(parts[:, :SAMPLE]) is None or (bases := _bases(parts)) is None:
        return None
    factors = _multiples(parts, bases).to(torch.int32)
    return bases.view(n, -1), factors.T.reshape(n, -1)[:, :num]


def _bases(parts: Tensor) -> Tensor | None:
    """Returns such common factors of columns, [8, m] -> [m]; None if one has none. They are the
    greatest ones, or these divided by the least number that makes them short enough."""
    bases = _greatest(parts)
    factors = _multiples(parts, bases)
    if not ((factors == factors.round()) & (factors.abs() <= MAX_FACTOR + 1)).all():
        return None
    bases = torch.where((factors > MAX_FACTOR).any(0), -bases, bases)  # int8 has -128
    whole, left = bases.clone(), (~ALONE.holds(bases)).nonzero()[:, 0]
    for divisor in range(2, MAX_FACTOR + 1):
        if not len(left):
            break
        bases[left] = whole[left] / divisor
        left = left[~ALONE.holds(bases[left])]
    factors = _multiples(parts, bases)
    is_byte = (factors <= MAX_FACTOR) & (factors >= -MAX_FACTOR - 1) & (factors == factors.round())
    return bases if not len(left) and (is_byte & (parts == factors * bases)).all() else None


def _multiples(parts: Tensor, bases: Tensor) -> Tensor:
    return parts / bases.masked_fill(bases == 0, 1)


def _greatest(parts: Tensor) -> Tensor:
    """Returns the greatest common divisors of columns, [8, m] -> [m], as far as their largest
    value's last bit."""
    last = torch.frexp(parts.abs().amax(0)).exponent - MANTISSA_BITS - 1
    unit = torch.ones_like(parts[0]).ldexp(last)
    integers = (parts / unit).to(torch.int32)
    while len(integers) > 1:
        integers = torch.gcd(*integers.chunk(2))
    return integers[0] * unit


def zeros_fit(scales: Tensor) -> bool:
    """Whether the lowest bits of all scales, float32, are free for a code of zero."""
    return not bool((scales.view(torch.int32) & ((1 << ZERO_BITS) - 1)).any())
