"""The kernels for what the first layer reads, embeddings and angles, against torch."""

from dataclasses import replace

import pytest
import torch

from .test_codes import rounded_weight

DTYPES = [torch.float32, torch.bfloat16]
KINDS = [4, 8, "float8"]  # of codes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (130, 36), (200, 1)])
def test_look_up(kernels, dtype, shape):
    """Rows of a weight as it is, also of an odd number of bf16."""
    weight = torch.randn(shape).to(dtype)
    indices = torch.tensor([shape[0] - 1, 0, 3, 3])
    assert torch.equal(kernels.look_up(weight, indices), weight[indices])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_the_weight_does_not_have(kernels, dtype, is_packed):
    """They are NaN: the panels hold rows of padding, and other memory follows them."""
    weight = torch.randn(70, 8).to(dtype)
    indices = torch.tensor([-1, 69, 70, 10**12])
    if is_packed:
        found = kernels.look_up_packed(kernels.pack_float(weight.clone()), 70, indices)
    else:
        found = kernels.look_up(weight, indices)
    assert torch.equal(found[1], weight[69])
    assert found.isnan().all(dim=1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [70, 256, 7])
def test_rows_of_codes(kernels, dtype, kind, k):
    """They are the dequantised codes, in panels of 64 rows or in the last, incomplete one."""
    coded = rounded_weight(kernels, torch.randn(130, k).to(dtype), kind, min(128, k))
    indices = torch.tensor([129, 0, 64, 63, 0])
    columns = torch.randperm(k)
    for form in (coded, coded.with_offsets(), replace(coded, columns=columns)):
        expected = form.dequantize()[indices]
        own = replace(form, units=form.units.clone(), scales=form.scales.clone())
        packed = kernels.pack_coded(own, rounds=False)
        found = packed.rows(indices, torch.float32)
        if form.zeros is None:  # a level may round the product and the difference together
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
        else:
            assert torch.equal(found, expected)
            assert torch.equal(packed.rows(indices, dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [70, 256, 7])
def test_rows_of_int8(kernels, dtype, k):
    weight, indices = torch.randn(130, k).to(dtype), torch.tensor([129, 0, 64, 63, 0])
    rounded, (scales, shifts) = kernels.quantize_rows(kernels.rotated(weight))
    wide = rounded.float() * scales[:, None] + shifts[:, None]
    expected = kernels.rotated(wide, is_back=True)[indices].to(dtype)
    found = kernels.pack(weight, "int8").rows(indices, dtype)
    # A level may round the product and the sum together.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype.itemsize == 2 else 0, atol=2e-6)


@pytest.mark.parametrize("quantization", ["int8", "int4", "int8wo"])
def test_rows_of_codes_that_the_weight_does_not_have(kernels, quantization):
    packed = kernels.pack(torch.randn(70, 64), quantization)
    found = packed.rows(torch.tensor([-1, 69, 70, 10**12]), torch.float32)
    assert found.isnan().all(dim=1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_angles(kernels, num_tokens, scale):
    """Cosines and sines differ from those in float64 by rounding of the result only, also far
    away."""
    positions = torch.randint(0, 200_000, (num_tokens,))
    frequencies = 1e6 ** -(torch.arange(0, 20, 2) / 20)
    found = kernels.angles(positions, frequencies, None, scale)
    angles = (positions[:, None].float() * frequencies).double()
    for table, expected in zip(found, (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(table.double(), expected * scale, atol=2e-7, rtol=0)


def test_angles_of_axes(kernels):
    """Every pair of channels has the angle of its own axis."""
    positions = torch.stack([torch.arange(9), torch.arange(9) * 5, torch.arange(9) + 70])
    axes, frequencies = torch.tensor([2, 0, 1, 1, 2]), torch.rand(5)
    found = kernels.angles(positions, frequencies, axes, 1.0)
    for pair, axis in enumerate(axes.tolist()):
        own = kernels.angles(positions[axis], frequencies[pair : pair + 1], None, 1.0)
        for table, expected in zip(found, own, strict=True):
            assert torch.equal(table[:, pair : pair + 1], expected)


def test_angles_of_long_sequences(kernels):
    """Their tokens have frequencies of their own, beside tokens of short sequences."""
    positions, frequencies = torch.arange(50) * 31, torch.rand(2, 6)
    is_long = torch.arange(50) % 3 == 1
    found = kernels.angles(positions, frequencies, None, 1.2, is_long)
    unmarked = kernels.angles(positions, frequencies, None, 1.2)
    both = [kernels.angles(positions, own, None, 1.2) for own in frequencies]
    for index, table in enumerate(found):
        expected = torch.where(is_long[:, None], both[1][index], both[0][index])
        assert torch.equal(table, expected)
        assert torch.equal(unmarked[index], both[0][index])


def test_a_token_has_the_same_angles_in_every_step(kernels):
    """torch's cosines may depend on how many are computed at once."""
    positions, frequencies = torch.arange(41) * 977, torch.rand(7)
    whole = kernels.angles(positions, frequencies, None, 1.0)
    alone = [kernels.angles(positions[i : i + 1], frequencies, None, 1.0) for i in range(41)]
    for table, parts in zip(whole, zip(*alone, strict=True), strict=True):
        assert torch.equal(table, torch.cat(parts))


def test_an_id_in_the_place_of_another(kernels):
    ids = torch.tensor([3, 7, 7, 0, -1, 12])
    assert kernels.replace_id(ids, 7, 1).tolist() == [3, 1, 1, 0, -1, 12]
    assert kernels.replace_id(ids, 8, 1).equal(ids)


def test_every_level(kernels_of_level):
    test_look_up(kernels_of_level, torch.bfloat16, (130, 36))
    test_rows_that_the_weight_does_not_have(kernels_of_level, torch.bfloat16, True)
    for kind in KINDS:
        test_rows_of_codes(kernels_of_level, torch.bfloat16, kind, 70)
    test_rows_of_int8(kernels_of_level, torch.bfloat16, 70)
    test_angles(kernels_of_level, 7, 1.3)
    test_angles_of_axes(kernels_of_level)
    test_angles_of_long_sequences(kernels_of_level)
