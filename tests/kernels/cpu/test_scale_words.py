"""Scales of weights in 4 bits take half a word where that holds them exactly."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.kernels.coded import CodedWeight, units_of
from mmdeploy_llm.kernels.cpu.scale_words import (
    BLOCK_ZEROS,
    BLOCKS,
    OFFSETS,
    PAIRS,
    SHORT,
    SHORT_ZEROS,
    ZEROS,
    zeros_fit,
)


def weight_of(scales, zeros=None, bits=4, offsets=None):
    """Returns a weight with these scales [n, G] in groups of 16."""
    n, num = scales.shape
    codes = torch.arange(n * num * 16).view(n, -1).mul(7).remainder(2**bits).to(torch.uint8)
    return CodedWeight(
        bits=bits,
        k=num * 16,
        group_size=16,
        units=units_of(codes, bits),
        scales=scales,
        zeros=zeros,
        offsets=offsets,
    )


def random_zeros(scales):
    return torch.randint(0, 16, scales.shape, dtype=torch.uint8)


def middle(scales):
    return torch.full(scales.shape, 8, dtype=torch.uint8)


def bf16(least, end):
    """Returns all bfloat16 numbers from `least` up to `end`, and 0, as rows of seven groups."""
    bits = torch.arange(2**15, dtype=torch.int32) << 16
    numbers = bits.view(torch.float32)
    numbers = numbers[(numbers >= least) & (numbers < end)]
    return torch.cat([numbers, numbers.new_zeros(-len(numbers) % 7 + 7)]).view(-1, 7)


def halves(end):
    """Returns all positive IEEE halves up to `end`, subnormal ones too."""
    numbers = torch.arange(2**15, dtype=torch.int16).view(torch.float16).float()
    numbers = numbers[numbers < end]
    return torch.cat([numbers, numbers.new_zeros(-len(numbers) % 6)]).view(-1, 6)


def test_what_half_a_word_holds_is_read_as_it_was(kernels):
    cases = (
        (SHORT_ZEROS, bf16(2**-28, 8), random_zeros),
        (SHORT, bf16(2**-24, 128), middle),
        (SHORT, -halves(128), middle),
        (ZEROS, halves(128), random_zeros),
    )
    for form, scales, zeros in cases:
        weight = weight_of(scales, zeros(scales))
        expected = weight.dequantize()
        packed = kernels.pack_coded(weight, rounds=True)
        assert packed.scale_form % 256 == form
        assert torch.equal(packed.rows(torch.arange(packed.n), torch.float32), expected)
        pairs = -(-scales.shape[1] // 2)
        assert packed.scales.shape[1] == (scales.shape[1] if form == ZEROS else pairs)


@pytest.mark.parametrize("zeros", [random_zeros, middle])
@pytest.mark.parametrize("scale", [2.0**-29, 128.0, 1 + 2.0**-11, float("nan")])
def test_one_other_scale_makes_all_of_them_long(kernels, zeros, scale):
    scales = torch.rand(3, 5).bfloat16().float()
    scales[1, 2] = scale
    packed = kernels.pack_coded(weight_of(scales, zeros(scales)), rounds=False)
    assert packed.scale_form in ({ZEROS} if scale < 1e30 else {ZEROS, OFFSETS})


def test_a_zero_past_the_codes_and_a_scale_below_0_need_words(kernels):
    scales = torch.rand(3, 5).bfloat16().float()
    for zero, sign in ((16, 1), (3, -1)):
        zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
        zeros[0, 0] = 2
        weight = weight_of(scales * sign, zeros)
        packed = kernels.pack_coded(weight, rounds=False)
        assert packed.scale_form == ZEROS


def halves_of(*shape):
    """Returns random numbers that IEEE halves hold, some of them subnormal or 0."""
    numbers = torch.randn(shape) * torch.where(torch.rand(shape) < 0.1, 1e-6, 0.02)
    return (numbers * (torch.rand(shape) > 0.05)).half().float()


def in_blocks(num, low, high):
    """Returns 70 rows of multiples, from `low` to `high`, of one half for every 8 groups."""
    factors = torch.randint(low, high + 1, (70, num))
    return halves_of(70, -(-num // 8)).repeat_interleave(8, 1)[:, :num] * factors


def in_words(weight):
    """Returns the longest form, which holds all scales and offsets."""
    both = torch.stack([weight.scales, weight.with_offsets().offsets], -1)
    return OFFSETS, both.view(torch.int32).flatten(1).clone()


def assert_read_as_words(kernels, monkeypatch, weight, form):
    """Packs the weight in the form, and compares rows and products with those of longer words."""
    expected = weight.dequantize()
    for rounds in (False, True):
        copy = replace(weight, units=weight.units.clone(), scales=weight.scales.clone())
        packed = kernels.pack_coded(copy, rounds=rounds)
        assert packed.scale_form % 256 == form
        with monkeypatch.context() as patch:
            patch.setattr("mmdeploy_llm.kernels.cpu.coded.scale_words", in_words)
            long = kernels.pack_coded(replace(weight, units=weight.units.clone()), rounds=rounds)
        assert long.scales.nbytes > packed.scales.nbytes
        rows, same = (own.rows(torch.arange(weight.n), torch.float32) for own in (packed, long))
        if form in (PAIRS, BLOCKS):  # one rounding or two: some levels subtract products at once
            assert torch.equal(rows, same)
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-6 * expected.abs().max())
        else:
            assert torch.equal(rows, expected)
        for x in torch.randn(9, weight.k).split([1, 8]):
            found, same = packed.product(x, None), long.product(x, None)
            if form in (PAIRS, BLOCKS):
                assert torch.equal(found, same)
            else:  # products may subtract zeros, or offsets in floats
                torch.testing.assert_close(found, same, rtol=1e-4, atol=1e-4 * same.abs().max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num", [4, 8, 13, 34])
def test_forms_of_files_are_read_as_words_are(kernels, monkeypatch, bits, num):
    zeros = torch.full((70, num), 5 * bits, dtype=torch.uint8)
    halves, blocks = halves_of(70, num), in_blocks(num, -128, 127)
    for form, weight in (
        (SHORT, weight_of(halves, zeros, bits)),
        (PAIRS, weight_of(halves, bits=bits, offsets=halves_of(70, num))),
        (BLOCK_ZEROS, weight_of(blocks, zeros, bits)),
        (BLOCKS, weight_of(blocks, bits=bits, offsets=in_blocks(num, 0, 63))),
    ):
        assert_read_as_words(kernels, monkeypatch, weight, form)


def test_forms_of_files_at_every_level(kernels_of_level, monkeypatch):
    test_forms_of_files_are_read_as_words_are(kernels_of_level, monkeypatch, 4, 13)
    test_forms_of_files_are_read_as_words_are(kernels_of_level, monkeypatch, 8, 13)


@pytest.mark.parametrize("largest", [1, 2, 31, 63, 64, 126, 127, -128])
def test_a_block_is_found_for_each_largest_factor(kernels, largest):
    """Also for those that are all multiples of a number, whose greatest divisor is too long."""
    base = torch.tensor([1 + 2**-10, 1 - 2**-11]).repeat(8)
    for step in (1, 3, 7):
        factors = torch.arange(16) * step % (abs(largest) + 1) // step * step
        factors[3] = largest
        for sign in (1, -1):
            scales = (base.view(8, 2).T.reshape(-1) * factors * sign)[None].repeat(5, 1)
            zeros = torch.full(scales.shape, 32, dtype=torch.uint8)
            weight = weight_of(scales, zeros, 8)
            expected = weight.dequantize()
            packed = kernels.pack_coded(weight, rounds=False)
            assert packed.scale_form % 256 in (SHORT, BLOCK_ZEROS)
            assert torch.equal(packed.rows(torch.arange(5), torch.float32), expected)


@pytest.mark.parametrize("factors", [(-128, 128), (129, 1), (0.5, 127.5), (float("inf"), 1)])
def test_no_block_is_found_where_there_is_none(kernels, factors):
    scales = torch.full((3, 16), 1 + 2**-10)
    scales[1, 8:10] *= torch.tensor(factors)
    weight = weight_of(scales, torch.full(scales.shape, 32, dtype=torch.uint8), 8)
    expected = weight.dequantize()
    packed = kernels.pack_coded(weight, rounds=False)
    assert packed.scale_form % 256 not in (SHORT, BLOCK_ZEROS)
    found = packed.rows(torch.arange(3), torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_codes_that_round_codes_chooses_have_short_scales(kernels):
    weight = torch.randn(5, 200) * torch.logspace(-12, 1, 5)[:, None]
    weight[3, 64:128] = 0
    coded = kernels.round_codes(weight, 4, 64)
    expected = coded.dequantize()
    packed = kernels.pack_coded(coded, rounds=False)
    assert packed.scale_form == SHORT_ZEROS
    assert torch.equal(packed.rows(torch.arange(5), torch.float32), expected)
    assert (expected - weight).abs().max() < 0.2 * weight.abs().max()


def test_zeros_fit():
    assert zeros_fit(torch.rand(4, 4).bfloat16().float())
    assert zeros_fit(torch.rand(4, 4).half().float())
    assert not zeros_fit(torch.tensor([1 / 3]))
