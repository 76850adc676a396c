"""The words of scales that a weight in few bits has beside its codes, see codes.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import CodedWeight

ZEROS, OFFSETS, SHORT_ZEROS, SHORT = range(4)  # forms
ZERO_BITS = 8  # the lowest ones of a word, where these are free
MIDDLE = 8  # the zero of all groups in the form SHORT
EXPONENTS = 31  # of a short scale
MANTISSA_BITS = 23  # of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    """A form of scales in half a word: their bits of mantissa, and the least scale but 0."""

    mantissa: int
    least: float

    def bits(self, scales: Tensor) -> Tensor | None:
        """Returns the magnitudes of scales in this form, int32; None if it does not hold them."""
        size, least = scales.abs(), self.least
        is_within = (size >= least) & (size < least * 2**EXPONENTS)
        bits = (size * (2.0**-126 / least)).view(torch.int32)  # 2^-126 has the exponent 1
        lost = MANTISSA_BITS - self.mantissa
        if not (is_within | (size == 0)).all() or (bits & ((1 << lost) - 1)).any():
            return None
        return bits >> lost


WITH_ZERO, ALONE = _Short(mantissa=7, least=2.0**-28), _Short(mantissa=10, least=2.0**-24)


def scale_words(weight: CodedWeight) -> tuple[int, Tensor]:
    """Returns the form of a weight's scales, and the words [n, W] int32 of each row: for pairs of
    groups, for groups, or scales and offsets in turn. What half a word holds exactly takes half of
    one. The memory of scales may be reused."""
    scales = weight.scales.contiguous()  # those of some columns are a view
    if weight.bits == 4 and weight.zeros is not None:
        short = _halves(scales, weight.zeros)
        if short is not None:
            form, halves = short
            if halves.shape[1] % 2:
                halves = torch.nn.functional.pad(halves, (0, 1))
            return form, halves[:, ::2] | halves[:, 1::2] << 16
    if weight.zeros is not None and zeros_fit(scales):
        return ZEROS, scales.view(torch.int32).bitwise_or_(weight.zeros)
    offsets = weight.with_offsets().offsets
    assert offsets is not None
    return OFFSETS, torch.stack([scales, offsets], -1).view(torch.int32).flatten(1)


def _halves(scales: Tensor, zeros: Tensor) -> tuple[int, Tensor] | None:
    """Returns the form and the halves of words, int32 [n, G]."""
    if (zeros == MIDDLE).all():
        bits = ALONE.bits(scales)
        return None if bits is None else (SHORT, bits | scales.view(torch.int32) >> 16 & 0x8000)
    bits = WITH_ZERO.bits(scales)
    if bits is None or zeros.max() > 15 or (scales < 0).any():
        return None
    return SHORT_ZEROS, bits << 4 | zeros


def zeros_fit(scales: Tensor) -> bool:
    """Whether the lowest bits of all scales, float32, are free for a code of zero."""
    return not bool((scales.view(torch.int32) & ((1 << ZERO_BITS) - 1)).any())
