"""CodedWeight: codes in units, scales and zeros."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout, joined, units_of, units_of_words


def a_weight(bits, n=3, k=70, group_size=32):
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (n, k), generator=random, dtype=torch.uint8)
    num = -(-k // group_size)
    weight = CodedWeight(
        bits=bits,
        k=k,
        group_size=group_size,
        units=units_of(codes, bits),
        scales=torch.rand(n, num, generator=random).bfloat16().float(),
        zeros=torch.randint(0, 2**bits, (n, num), generator=random, dtype=torch.uint8),
    )
    return weight, codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("k", [1, 8, 70])
def test_codes(bits, k):
    weight, codes = a_weight(bits, k=k)
    assert torch.equal(weight.codes(), codes)
    assert weight.num_bytes == weight.units.nbytes + weight.scales.nbytes + weight.zeros.nbytes


def test_a_unit_of_four_bits():
    """Byte j holds code j below code 4 + j."""
    units = units_of(torch.arange(8, dtype=torch.uint8)[None], 4)
    assert units.view(torch.uint8).tolist() == [[0x40, 0x51, 0x62, 0x73]]


def test_words():
    codes = torch.randint(0, 16, (5, 24), dtype=torch.uint8)
    words = torch.zeros(5, 3, dtype=torch.int64)
    for index in range(8):
        words |= codes[:, index::8].long() << 4 * index
    words = words.to(torch.int32)
    assert torch.equal(units_of_words(words), units_of(codes, 4))
    weight, _ = a_weight(4, n=5, k=24)
    weight = replace(weight, units=words, in_words=True)
    assert torch.equal(weight.codes(), codes)
    as_units = replace(weight, units=units_of(codes, 4), in_words=False)
    for parts in ([weight, weight], [weight, as_units]):
        both = joined(parts, torch.empty(10, 3, dtype=torch.int32))
        assert both.in_words is parts[1].in_words
        assert torch.equal(both.codes(), torch.cat([codes, codes]))
    assert torch.equal(weight.recoded(CodeLayout(bits=8, group_size=16)).codes(), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize(bits):
    weight, codes = a_weight(bits)
    for row in range(3):
        for column in range(70):
            group = column // 32
            steps = int(codes[row, column]) - int(weight.zeros[row, group])
            expected = steps * weight.scales[row, group]
            assert weight.dequantize()[row, column] == expected
    torch.testing.assert_close(weight.with_offsets().dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_an_order_of_columns(bits):
    plain, _ = a_weight(bits)
    columns = torch.randperm(70)
    expected = torch.empty(3, 70)
    expected[:, columns] = plain.dequantize()
    weight = replace(plain, columns=columns)
    assert torch.equal(weight.dequantize(), expected)
    assert torch.equal(weight.layout.columns, columns)
    assert torch.equal(weight.rows(slice(1, 3)).dequantize(), expected[1:])
    assert torch.equal(weight.recoded(replace(weight.layout, bits=8)).dequantize(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group_size", "first", "stop", "can_cut"),
    [
        (32, 0, 32, True),
        (32, 32, 70, True),
        (32, 0, 48, False),
        (32, 16, 70, False),
        (70, 16, 48, True),
        (70, 0, 33, False),
    ],
)
def test_a_share_of_columns(bits, group_size, first, stop, can_cut):
    weight, _ = a_weight(bits, group_size=group_size)
    assert weight.layout.can_cut(70, first, stop) is can_cut
    if can_cut:
        assert torch.equal(weight.cut(first, stop).dequantize(), weight.dequantize()[:, first:stop])
    ordered = replace(weight.layout, order=torch.arange(70).numpy().tobytes())
    assert not ordered.can_cut(70, first, stop)


def test_rows_and_joined():
    weight, _ = a_weight(4, n=6)
    whole = weight.dequantize()
    parts = weight.split(3)
    assert [part.n for part in parts] == [2, 2, 2]
    assert torch.equal(joined(parts, torch.empty_like(weight.units)).dequantize(), whole)
    mixed = joined([parts[0], parts[1].with_offsets(), parts[2]], torch.empty_like(weight.units))
    assert mixed.zeros is None
    torch.testing.assert_close(mixed.dequantize(), whole)


def test_joined_of_other_bits_and_groups():
    four, _ = a_weight(4, group_size=32)
    eight, _ = a_weight(8, group_size=16)
    both = joined([four, eight], torch.empty(6, 18, dtype=torch.int32))
    assert (both.bits, both.group_size) == (8, 16)
    assert torch.equal(both.dequantize(), torch.cat([four.dequantize(), eight.dequantize()]))
