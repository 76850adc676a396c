"""Turns the blocks of GGUF's types with integer steps into CodedWeights, without dequantising them.

    type   block                                                         value
    Q4_0   32: d, 16 bytes of nibbles                                    d (q - 8)
    Q4_1   32: d, m, 16 bytes of nibbles                                 d q + m
    Q5_0   32: d, 4 bytes of fifth bits, 16 bytes of nibbles             d (q - 16)
    Q5_1   32: d, m, 4 bytes of fifth bits, 16 bytes of nibbles          d q + m
    Q8_0   32: d, 32 int8                                                d q
    Q4_K   256: d, m, 12 bytes of 6-bit scales, 128 bytes of nibbles     d s q - m t, 32 at a time
    Q5_K   256: the same, with 32 bytes of fifth bits                    the same
    Q6_K   256: 128 bytes of nibbles, 64 of upper pairs, 16 int8, d      d s (q - 32), 16 at a time
    IQ4_NL 32: d, 16 bytes of nibbles                                    d LEVELS[q]
    IQ4_XS 256: d, 2 and 4 bytes of 6-bit scales, 128 bytes of nibbles   d (s - 32) LEVELS[q]

In a run of 32 or 64 values the lower nibbles hold the first half, the upper ones the second.
Layouts: the header ggml-common of ggml; the package `gguf` dequantises the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout, units_of

LAYOUTS: Mapping[str, CodeLayout] = MappingProxyType(
    {
        "Q4_0": CodeLayout(bits=4, group_size=32),
        "Q4_1": CodeLayout(bits=4, group_size=32),
        "Q5_0": CodeLayout(bits=8, group_size=32),
        "Q5_1": CodeLayout(bits=8, group_size=32),
        "Q8_0": CodeLayout(bits=8, group_size=32),
        "Q4_K": CodeLayout(bits=4, group_size=32),
        "Q5_K": CodeLayout(bits=8, group_size=32),
        "Q6_K": CodeLayout(bits=8, group_size=16),
        "IQ4_NL": CodeLayout(bits=8, group_size=32),
        "IQ4_XS": CodeLayout(bits=8, group_size=32),
    }
)
# Of the types IQ4, whose 16 values are not evenly spaced: they become codes of 8 bits.
LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def coded_rows(name: str, data: Tensor, k: int) -> CodedWeight:
    """Returns the rows of a tensor of type `name`, one of LAYOUTS. data: [n, bytes of a row] uint8.
    k: values of a row."""
    return _READERS[name](data, k)


def _weight(
    name: str,
    codes: Tensor,
    scales: Tensor,
    k: int,
    *,
    zero: int | None = None,
    offsets: Tensor | None = None,
) -> CodedWeight:
    """Returns a weight of codes [n, k], with one code of zero for all groups or with offsets."""
    layout, n = LAYOUTS[name], codes.shape[0]
    scales = scales.reshape(n, -1).contiguous()
    zeros = None if zero is None else torch.full(scales.shape, zero, dtype=torch.uint8)
    return CodedWeight(
        bits=layout.bits,
        k=k,
        group_size=layout.group_size,
        units=units_of(codes.reshape(n, k), layout.bits),
        scales=scales,
        zeros=zeros,
        offsets=None if offsets is None else offsets.reshape(n, -1).contiguous(),
    )


def _halves(data: Tensor) -> Tensor:
    """Returns float16 values, stored as two bytes each, [..., 2 c] uint8 -> [..., c] float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """Returns the codes of bytes [..., c]: of each run of bytes the lower nibbles, then the upper
    ones, [..., 2 c]."""
    runs = data.reshape(*data.shape[:-1], -1, run)
    return torch.cat([runs & 15, runs >> 4], -1).flatten(-2)


def _q4_0(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 18)
    return _weight("Q4_0", _nibbles(blocks[..., 2:], 16), _halves(blocks[..., :2]), k, zero=8)


def _q4_1(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 20)
    scales, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return _weight("Q4_1", _nibbles(blocks[..., 4:], 16), scales, k, offsets=-least)


def _fifth_bits(data: Tensor) -> Tensor:
    """Returns bit i of four bytes [..., 4], lowest first, as 16 in value i: [..., 32]."""
    bits = (data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q5_0(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 22)
    codes = _nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks[..., 2:6])
    return _weight("Q5_0", codes, _halves(blocks[..., :2]), k, zero=16)


def _q5_1(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 24)
    codes = _nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks[..., 4:8])
    scales, least = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return _weight("Q5_1", codes, scales, k, offsets=-least)


def _q8_0(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 34)
    codes = blocks[..., 2:] ^ 128  # adds 128 to a signed byte
    return _weight("Q8_0", codes, _halves(blocks[..., :2]), k, zero=128)


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and offsets of the eight groups of blocks of Q4_K or Q5_K, [..., 8]. Their 6
    bits: the first four are the lower ones of bytes 0 to 7; the others have four bits in bytes 8 to
    11 and the upper two of bytes 0 to 7."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    factors = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], -1).float()
    least = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], -1).float()
    return _halves(blocks[..., :2]) * factors, _halves(blocks[..., 2:4]) * least


def _q4_k(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 144)
    scales, offsets = _scales_of_k(blocks)
    return _weight("Q4_K", _nibbles(blocks[..., 16:], 32), scales, k, offsets=offsets)


def _q5_k(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 176)
    scales, offsets = _scales_of_k(blocks)
    # Bit g of byte i is the fifth bit of value i of group g.
    upper = (blocks[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _nibbles(blocks[..., 48:], 32) | (upper.flatten(-2) << 4)
    return _weight("Q5_K", codes, scales, k, offsets=offsets)


def _q6_k(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 210)
    low = _nibbles(blocks[..., :128], 64)
    # Each of 32 bytes holds two bits of the values i, 32 + i, 64 + i and 96 + i of its half.
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    codes = low | (((pairs >> shifts) & 3).flatten(-3) << 4)
    factors = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scales = _halves(blocks[..., 208:]) * factors
    return _weight("Q6_K", codes, scales, k, zero=32)


def _leveled(data: Tensor) -> Tensor:
    """Returns 128 and the level of each value of blocks of 16 bytes: [..., 32] for each."""
    codes = torch.tensor([level + 128 for level in LEVELS], dtype=torch.uint8)
    return codes[_nibbles(data, 16).int()]


def _iq4_nl(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 18)
    return _weight("IQ4_NL", _leveled(blocks[..., 2:]), _halves(blocks[..., :2]), k, zero=128)


def _iq4_xs(data: Tensor, k: int) -> CodedWeight:
    blocks = data.view(len(data), -1, 136)
    low = _nibbles(blocks[..., 4:8], 1)
    pairs = (blocks[..., 2:4].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)) & 3
    factors = (low | pairs.flatten(-2) << 4).float() - 32
    scales = _halves(blocks[..., :2]) * factors
    return _weight("IQ4_XS", _leveled(blocks[..., 8:]), scales, k, zero=128)


_READERS: Mapping[str, Callable[[Tensor, int], CodedWeight]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
    }
)
