"""Computes the masses of tokens as integers, so that sums of them are exact in any order.

A mass is exp(z) in whole units of 2**-42 of the largest logit's. Each operation of it is rounded by
itself, and none is a library's exponential: kernels/cpp/sampling/masses.h gives the same bits on
every processor.
"""

from __future__ import annotations

import torch
from torch import Tensor

FAR = -30.0  # the mass of a z that is not above it is 0
UNIT_BITS = 42  # sums stay below 2**63 for vocabularies of less than 2**21
LOG2E = 1.44269504
LN2 = (0.693359375, -2.12194440e-4)  # together; a product of the first with an integer is exact
# Cephes' polynomial: (exp(r) - 1 - r) / r**2, the highest power first
FIRST, *REST = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def masses(z: Tensor) -> Tensor:
    """Returns the masses of z <= 0, float32 of any shape, as int64; 0 for NaN."""
    x = torch.where(z > FAR, z, FAR)
    n = (x * LOG2E).round_()
    r = (x - n * LN2[0]) - n * LN2[1]
    y = torch.full_like(r, FIRST)
    for coefficient in REST:
        y = y.mul_(r).add_(coefficient)
    y = y.mul_(r).mul_(r).add_(r).add_(1.0)
    power = (n.to(torch.int32) + (127 + UNIT_BITS) << 23).view(torch.float32)
    return y.mul_(power).to(torch.int64)
