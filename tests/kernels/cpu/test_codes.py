"""Products with weights of 4 and 8 bits, compared with plain torch and with a float64 product."""

from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.kernels.coded import CodedWeight, units_of, units_of_words
from mmdeploy_llm.values.options.weight_formats import FORMATS

from .test_kernels import DTYPES, values

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def rounded_group(w, bits):
    """Rounds one group as `round_codes` promises; the first of equally good ranges."""
    largest, best = 2**bits - 1, None
    low, high = w.min().clamp(max=0), w.max().clamp(min=0)
    for ratio in RATIOS if bits == 4 else (1.0,):
        ratio = torch.tensor(ratio)
        scale = ((high - low) * ratio / largest).bfloat16().float()
        if scale == 0:
            return torch.zeros_like(w), scale, torch.tensor(0.0)
        zero = (-low * ratio / scale).round().clamp(0, largest)
        codes = ((w * (1 / scale)).round() + zero).clamp(0, largest)
        error = float((((codes - zero) * scale - w).double() ** 2).sum())
        if best is None or error < best[0] * (1 - 1e-6):
            best = error, codes, scale, zero
    return best[1:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k", "group_size"), [(3, 64, 32), (2, 150, 64), (5, 7, 7)])
def test_rounding(kernels, dtype, bits, n, k, group_size):
    weight = values(n, k, dtype=dtype)
    weight[0, :group_size] = 0
    weight[-1, :group_size] = weight[-1, :group_size].abs()
    found = kernels.round_codes(weight, bits, group_size)
    codes, parts = found.codes(), weight.float().split(group_size, 1)
    different = 0
    for group, part in enumerate(parts):
        own = codes[:, group * group_size :][:, : part.shape[1]]
        for row in range(n):
            expected, scale, zero = rounded_group(part[row], bits)
            if found.scales[row, group] != scale:  # two ranges that are equally good but for sums
                different += 1
                continue
            assert found.zeros[row, group] == zero
            assert (own[row].float() - expected).abs().max() <= 1  # between two codes
            assert (own[row].float() == expected).float().mean() > 0.9
    assert different <= 1
    assert not codes[0, :group_size].any()


def rounded_weight(kernels, weight, kind, group_size):
    """Returns a weight in 4 or 8 bits, or in 8-bit floats as checkpoints hold them."""
    if kind != "float8":
        return kernels.round_codes(weight, kind, group_size)
    groups = weight.float().split(group_size, 1)
    scales = torch.stack([own.abs().amax(1) for own in groups], 1).clamp_min_(1e-6) / 448
    steps = scales.repeat_interleave(group_size, 1)[:, : weight.shape[1]]
    codes = (weight.float() / steps).to(torch.float8_e4m3fn).view(torch.uint8)
    return CodedWeight(
        bits=8,
        k=weight.shape[1],
        group_size=group_size,
        units=units_of(codes, 8),
        scales=scales,
        zeros=torch.zeros(scales.shape, dtype=torch.uint8),
        is_float8=True,
    )


def forms(coded):
    """Yields a weight with each form of scales that it can have in memory."""
    yield coded
    yield coded.with_offsets()
    if coded.bits == 4:
        yield replace(coded, scales=coded.scales * (1 + 2**-8))  # too long for half a word
        zeros, signs = torch.full_like(coded.zeros, 8), torch.randn(coded.scales.shape).sign()
        yield replace(coded, zeros=zeros, scales=coded.scales * signs)


# Codes, and whether x is rounded.
KINDS = [(4, False), (4, True), (8, False), (8, True), ("float8", False)]
CASES = [(1, 64, 256), (5, 130, 200), (7, 63, 1030), (33, 200, 64), (1, 1, 1), (200, 70, 160)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "rounds"), KINDS)
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 1030])
def test_products(kernels, dtype, kind, rounds, group_size):
    for rows, n, k in CASES:
        plain = values(n, k, dtype=torch.float32)
        coded = rounded_weight(kernels, plain, kind, min(group_size, k))
        if not kernels.can_pack_coded(coded.layout, (n, k)):
            continue
        x = values(rows, k + 3, dtype=dtype)[:, 1 : k + 1]
        bias = values(n, dtype=dtype)
        multiplied = rounded_rows(x, by_row=kind == 4) if rounds else x.double()
        for form in forms(coded):
            weight = form.dequantize().double()
            expected = multiplied @ weight.T + bias.double()
            own = replace(form, units=form.units.clone(), scales=form.scales.clone())
            found = kernels.pack_coded(own, rounds=rounds).product(x, bias).double()
            slack = x.float().abs().max() / 127 * weight.abs().max() * 1.5 if rounds else 0
            tolerance = 1e-5 if dtype is torch.float32 else 2**-7
            scale = (x.double().abs() @ weight.abs().T).max()
            limit = slack + 2e-6 * scale + tolerance * expected.abs()
            assert ((found - expected).abs() <= limit).all()


def rounded_rows(x, *, by_row):
    """Returns x as it is with a scale for every 64 values. by_row: whether these are the scale of
    the row divided by powers of two."""
    parts, row = [], x.float().abs().amax(1, keepdim=True)
    for part in x.float().split(64, 1):
        largest = part.abs().amax(1, keepdim=True)
        if by_row:
            largest = row / 2.0 ** (torch.frexp(row / largest).exponent - 1)
        step = largest / 127
        parts.append((part / step.clamp(min=1e-30)).round() * step)
    return torch.cat(parts, 1).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_products_of_each_name(kernels, dtype, name):
    """They are those of plain torch with the values of the codes, and with rounded rows of x where
    the name rounds them, as they are or rotated."""
    own, x = FORMATS[name], values(9, 200, dtype=dtype)
    packed = kernels.pack(values(70, 200, dtype=dtype), name)
    weight = packed.rows(torch.arange(70), torch.float32).double()
    if own.activation_bits is None:
        rows = x.double()
    elif own.group_size is None:
        rounded = rounded_rows(kernels.rotated(x), by_row=False).float()
        rows = kernels.rotated(rounded, is_back=True)
    else:
        rows = rounded_rows(x, by_row=own.bits == 4)
    found, expected = packed.product(x, None).double(), rows.double() @ weight.T
    # Of a few values that lie between two steps each way of dividing takes another.
    limit = 1e-3 if own.activation_bits is None else 5e-3
    limit = max(limit, 5e-3 * (dtype is torch.bfloat16))
    assert (found - expected).norm() < limit * expected.norm()
    unrounded = (x.double() @ weight.T - expected).norm() / expected.norm()
    assert (unrounded > 1e-3) == (own.activation_bits is not None)


def test_small_values_keep_their_precision_beside_a_large_one(kernels):
    """Groups of x in another order of magnitude are rounded with as many steps."""
    x = torch.full((9, 512), 1e-3)
    x[:, 128] = 1000.0
    codes = torch.full((64, 512), 9, dtype=torch.uint8)
    codes[:, 128:256] = 8
    weight = CodedWeight(
        bits=4,
        k=512,
        group_size=64,
        units=units_of(codes, 4),
        scales=torch.ones(64, 8),
        zeros=torch.full((64, 8), 8, dtype=torch.uint8),
    )
    found = kernels.pack_coded(weight, rounds=True).product(x, None)
    assert torch.allclose(found, torch.tensor(384e-3), rtol=0.01)


@pytest.mark.parametrize("most", [4, 5, 6, 8])
def test_integers_are_exact(kernels, most):
    """Largest products of one sign, of codes that have so many bits at most: no sum saturates."""
    bits, largest, k = (4 if most == 4 else 8), 2**most - 1, 544
    for sign in (1, -1):
        for rows in (1, 2, 3, 6, 7):
            x = torch.full((rows, k), 127 * sign)
            codes = torch.full((70, k), largest, dtype=torch.uint8)
            codes[::3, ::5] = 0
            weight = CodedWeight(
                bits=bits,
                k=k,
                group_size=128,
                units=units_of(codes, bits),
                scales=torch.ones(70, 5),
                zeros=torch.zeros(70, 5, dtype=torch.uint8),
            )
            found = kernels.pack_coded(weight, rounds=True).product(x.float(), None)
            assert torch.equal(found.long(), x @ codes.long().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_every_float_of_8_bits(kernels, dtype, rows):
    """Each code has the value that torch gives it, subnormal ones and both zeros included."""
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    codes, expected = codes[expected.isfinite()], expected[expected.isfinite()]
    weight = CodedWeight(
        bits=8,
        k=256,
        group_size=256,
        units=units_of(torch.diag_embed(torch.cat([codes, codes[:2]])), 8),
        scales=torch.ones(256, 1),
        zeros=torch.zeros(256, 1, dtype=torch.uint8),
        is_float8=True,
    )
    found = kernels.pack_coded(weight, rounds=False).product(torch.ones(rows, 256).to(dtype), None)
    assert torch.equal(found[:, :254].float(), expected.expand(rows, -1))


def test_zeros(kernels):
    coded = kernels.round_codes(torch.zeros(3, 64), 4, 32)
    assert not coded.dequantize().any()
    found = kernels.pack_coded(coded, rounds=True).product(torch.zeros(2, 64), None)
    assert torch.equal(found, torch.zeros(2, 3))


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("kind", "rounds"), KINDS)
@pytest.mark.parametrize("k", [64, 1090])
def test_a_row_has_the_same_bits_in_every_batch(kernels, kind, rounds, k):
    coded = rounded_weight(kernels, values(130, k, dtype=torch.bfloat16), kind, 64)
    packed, x = kernels.pack_coded(coded, rounds=rounds), values(200, k, dtype=torch.bfloat16)
    alone = torch.cat([packed.product(row, None) for row in x.split(1)])
    for num in (*range(2, 34), 191, 192, 193, 200):
        assert torch.equal(packed.product(x[:num], None), alone[:num]), num


@pytest.mark.parametrize("name", [None, *FORMATS])
def test_no_rows(kernels, name):
    for dtype in DTYPES:
        packed = kernels.pack(values(70, 128, dtype=dtype), name)
        if packed is None:  # torch multiplies by floats at the portable level
            assert name is None
            assert not kernels.has_wide_registers
            continue
        assert packed.product(values(0, 128, dtype=dtype), None).shape == (0, 70)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [None, *FORMATS])
def test_a_row_that_is_not_finite_shows_it_and_is_alone(kernels, name, value):
    for dtype in DTYPES:
        packed = kernels.pack(values(70, 200, dtype=dtype), name)
        if packed is None:
            continue
        for num in (1, 3, 40):  # rows, which registers and tiles multiply
            for column in (0, 70, 199):
                x = values(num, 200, dtype=dtype)
                x[num // 2, column] = value
                is_finite = packed.product(x, None).isfinite()
                expected = torch.arange(num) != num // 2
                assert torch.equal(is_finite, expected[:, None].expand(-1, 70)), (num, column)


def test_tiny_values_are_rounded_to_nothing(kernels):
    x = values(2, 128, dtype=torch.float32)
    x[1] *= 1e-37
    found = kernels.pack(values(70, 128, dtype=torch.float32), "int8").product(x, None)
    assert found[1].abs().max() < 1e-34


@pytest.mark.parametrize("n", [64, 70])
def test_words_are_laid_out_as_units_are(kernels, n):
    words = torch.randint(-(2**31), 2**31 - 1, (n, 21), dtype=torch.int32)
    found = kernels.pack_units(words.clone(), in_words=True)
    assert torch.equal(found, kernels.pack_units(units_of_words(words)))


def test_packing_needs_no_memory_of_its_own(kernels):
    coded = kernels.round_codes(values(128, 64, dtype=torch.float32), 4, 32)
    assert kernels.pack_coded(coded, rounds=False).units.data_ptr() == coded.units.data_ptr()


# Codes of 8 bits that occur, and the bytes of a block of 32 in memory.
SHORT_CODES = {
    "all": (range(256), 32),
    "64": (range(64), 24),
    "one more": (range(65), 32),
    "32": (range(32), 20),
    "33": (range(33), 24),
    "16 of all": (range(3, 250, 16), 16),
    "17 of all": ((*range(3, 250, 16), 251), 32),
    "IQ4_NL": (
        (0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240),
        16,
    ),
}


@pytest.mark.parametrize("codes", SHORT_CODES)
@pytest.mark.parametrize("rounds", [False, True])
def test_codes_in_fewer_bits_give_what_whole_ones_give(kernels, codes, rounds):
    """To the last bit, in every number of rows, with scales of each kind; rows that are looked up
    too. A row of a panel that the weight does not have is never read."""
    own, num_bytes = SHORT_CODES[codes]
    own = torch.tensor(own, dtype=torch.uint8)
    for n, k, group_size in ((70, 1120, 16), (64, 96, 32)):
        chosen = torch.cat([torch.arange(len(own)), torch.randint(len(own), (n * k - len(own),))])
        units = units_of(own[chosen].view(n, k), 8)
        scales = torch.rand(n, k // group_size)
        weight = CodedWeight(
            bits=8,
            k=k,
            group_size=group_size,
            units=units,
            scales=scales,
            offsets=torch.randn_like(scales),
        )
        fewer = kernels.pack_coded(replace(weight, units=units.clone()), rounds=rounds)
        assert fewer.units.nbytes == -(-n // 64) * 64 * k // 32 * num_bytes
        whole = kernels.pack_coded(replace(weight, units=units.clone()), rounds=rounds)
        whole.units, whole.code_form = kernels.pack_units(units.clone()), 0
        for dtype in DTYPES:
            for num_rows in (1, 6, 13, 70):
                x = values(num_rows, k, dtype=dtype)
                assert torch.equal(fewer.product(x, None), whole.product(x, None)), num_rows
            ids = torch.tensor([0, n - 1, 5, 63])
            found = fewer.rows(ids, dtype)
            assert torch.equal(found, whole.rows(ids, dtype))
            assert torch.allclose(found.float(), weight.dequantize()[ids], rtol=2**-7, atol=1e-5)


def test_codes_of_no_whole_block_stay_whole(kernels):
    units = units_of(torch.randint(16, (64, 100), dtype=torch.uint8), 8)
    scales, zeros = torch.rand(64, 1), torch.zeros(64, 1, dtype=torch.uint8)
    weight = CodedWeight(bits=8, k=100, group_size=100, units=units, scales=scales, zeros=zeros)
    packed = kernels.pack_coded(replace(weight, units=units.clone()), rounds=False)
    assert packed.units.nbytes == units.nbytes
    x = values(3, 100, dtype=torch.float32)
    assert torch.allclose(packed.product(x, None), x @ weight.dequantize().T, atol=1e-4)


def test_every_level(kernels_of_level):
    for codes in SHORT_CODES:
        for rounds in (False, True):
            test_codes_in_fewer_bits_give_what_whole_ones_give(kernels_of_level, codes, rounds)
    for dtype in DTYPES:
        for bits in (4, 8):
            test_rounding(kernels_of_level, dtype, bits, 2, 150, 64)
            for rounds in (False, True):
                test_products(kernels_of_level, dtype, bits, rounds, 64)
    for most in (4, 5, 6, 8):
        test_integers_are_exact(kernels_of_level, most)
    for bits in (4, 8):
        test_a_row_has_the_same_bits_in_every_batch(kernels_of_level, bits, True, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_codes_in_another_order(kernels, dtype, bits, num_rows):
    """The product brings x, here a view with wider rows, into the order of the codes."""
    n, k = 70, 96
    columns = torch.randperm(k)
    weight = kernels.round_codes(values(n, k, dtype=dtype), bits, 32)
    x = values(num_rows, 2 * k, dtype=dtype)[:, :k]
    sorted_x = x[:, columns].contiguous()
    assert torch.equal(kernels.take_columns(x, columns), sorted_x)
    ordered = replace(
        weight, units=weight.units.clone(), scales=weight.scales.clone(), columns=columns
    )
    expected = x.double() @ ordered.dequantize().double().T
    found = kernels.pack_coded(ordered, rounds=False).product(x, None)
    plain = kernels.pack_coded(weight, rounds=False).product(sorted_x, None)
    assert torch.equal(found, plain)
    torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=0.05)
