"""Scales of weights in 4 bits take half a word where that holds them exactly."""

import pytest
import torch

from mmdeploy_llm.kernels.coded import CodedWeight, units_of
from mmdeploy_llm.kernels.cpu.scale_words import OFFSETS, SHORT, SHORT_ZEROS, ZEROS, zeros_fit


def weight_of(scales, zeros):
    """Returns a weight in 4 bits with these scales [n, G] in groups of 16."""
    n, num = scales.shape
    codes = torch.arange(n * num * 16).view(n, -1).mul(7).remainder(16).to(torch.uint8)
    return CodedWeight(
        bits=4, k=num * 16, group_size=16, units=units_of(codes, 4), scales=scales, zeros=zeros
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
        assert packed.scale_form == form
        assert torch.equal(packed.rows(torch.arange(packed.n), torch.float32), expected)
        pairs = -(-scales.shape[1] // 2)
        assert packed.scales.shape[1] == (scales.shape[1] if form == ZEROS else pairs)


@pytest.mark.parametrize("zeros", [random_zeros, middle])
@pytest.mark.parametrize("scale", [2.0**-29, 128.0, 1 + 2.0**-11, float("nan")])
def test_one_other_scale_makes_all_of_them_long(kernels, zeros, scale):
    scales = torch.rand(3, 5).bfloat16().float()
    scales[1, 2] = scale
    packed = kernels.pack_coded(weight_of(scales, zeros(scales)), rounds=False)
    assert packed.scale_form == ZEROS if scale < 1e30 else packed.scale_form in (ZEROS, OFFSETS)


def test_a_zero_past_the_codes_and_a_scale_below_0_need_words(kernels):
    scales = torch.rand(3, 5).bfloat16().float()
    for zero, sign in ((16, 1), (3, -1)):
        zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
        weight = weight_of(scales * sign, zeros)
        packed = kernels.pack_coded(weight, rounds=False)
        assert packed.scale_form == ZEROS


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
