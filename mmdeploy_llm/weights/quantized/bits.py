"""Unpacks small integers and 4-bit floats from words."""

from __future__ import annotations

import torch
from torch import Tensor

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
