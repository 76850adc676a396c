"""Products in the tiles of AMX beside those in registers, and beside torch's own tiles."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.kernels.cpu import CpuKernels, Level, cpu_levels

from .test_codes import rounded_weight

if Level.AMX not in cpu_levels():
    pytest.skip("this processor has no AMX", allow_module_level=True)


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(scope="session")
def in_tiles(build_kernels):
    return CpuKernels(build_kernels(Level.AMX))


@pytest.fixture(scope="session")
def in_registers(build_kernels):
    return CpuKernels(build_kernels(Level.AVX512_BF16))


@pytest.mark.full
@pytest.mark.parametrize("k", [4, 64, 200, 1090, 2500])
@pytest.mark.parametrize("rows", [1, 6, 7, 16, 17, 40, 401])
def test_int8_has_the_bits_of_registers(in_tiles, in_registers, rows, k):
    """Sums of integers are exact, and those of groups are added in the same order."""
    x, weight = values(rows, k), values(330, k, seed=1)
    found, expected = (
        kernels.pack(weight.clone(), "int8").product(x, None)
        for kernels in (in_tiles, in_registers)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 1090])
def test_codes_have_the_bits_of_registers(in_tiles, in_registers, bits, group_size, dtype):
    """For steps that fill a line of a tile and for shorter ones, scales in each form, offsets, and
    codes that lie in fewer bits; a row alone and in more rows than a task has."""
    for n, k in ((130, 1090), (64, 96), (70, 40)):
        weight = in_registers.round_codes(values(n, k, seed=1), bits, min(group_size, k))
        few = weight.units & 0x1F1F1F1F if bits == 8 else weight.units  # stored in 5 bits
        for form in (weight, weight.with_offsets(), replace(weight, units=few)):
            tiled, plain = (
                kernels.pack_coded(
                    replace(form, units=form.units.clone(), scales=form.scales.clone()), rounds=True
                )
                for kernels in (in_tiles, in_registers)
            )
            for rows in (33, 40, 401):
                x = values(rows, k + 3).to(dtype)[:, 1 : k + 1]
                found = tiled.product(x, None)
                assert torch.equal(found, plain.product(x, None)), (n, rows)
                assert torch.equal(found[rows - 1 :], tiled.product(x[rows - 1 :], None))


@pytest.mark.parametrize("kind", [4, 8, "float8"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 1090])
def test_floats_times_codes_have_the_bits_of_a_row_alone(in_tiles, kind, group_size):
    """Few rows are multiplied in registers. Values have any size; tiny ones are taken for 0."""
    for n, k in ((130, 1090), (64, 96), (70, 40)):
        weight = rounded_weight(in_tiles, values(n, k, seed=1), kind, min(group_size, k))
        few = weight.units & 0x1F1F1F1F if kind == 8 else weight.units  # stored in 5 bits
        for form in (weight, weight.with_offsets(), replace(weight, units=few)):
            own = replace(form, units=form.units.clone(), scales=form.scales.clone())
            packed = in_tiles.pack_coded(own, rounds=False)
            powers = torch.randint(-60, 60, (401, k), generator=torch.Generator().manual_seed(3))
            x = values(401, k + 3)[:, 1 : k + 1]  # rows that are no multiple of a line apart
            x *= powers.float().exp2().bfloat16()
            x[2, 5], x[3], x[4, 7] = 1e-30, 1e-39, 1e30
            alone = torch.cat([packed.product(row, None) for row in x.split(1)])
            assert not alone[3].any()
            for rows in (2, 6, 7, 16, 17, 40, 401):
                assert torch.equal(packed.product(x[:rows], None), alone[:rows]), (n, rows)
            exact = x.double() @ form.dequantize().double().T
            norms = x.double().norm(dim=1)[:, None] * form.dequantize().double().norm(dim=1)
            limits = exact.abs() * 2**-8 + norms * 1e-5 + 1e-25  # of what is taken for 0
            assert ((alone.double() - exact).abs() <= limits).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_tiles_of_torch_stay_as_they_were(in_tiles, threads):
    """Torch's products and its attention set up tiles of other shapes, on the same threads."""
    torch.set_num_threads(threads)
    x, weight, q = values(70, 96), values(130, 96, seed=1), values(1, 4, 70, 48, seed=2)
    packed = in_tiles.pack(weight.clone(), None)

    def by_torch():
        attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return F.linear(x, weight), F.linear(x[:3], weight[:5]), attended

    before, own = by_torch(), packed.product(x, None)
    for _ in range(5):
        assert torch.equal(packed.product(x, None), own)
        for found, expected in zip(by_torch(), before, strict=True):
            assert torch.equal(found, expected)
    torch.testing.assert_close(own, F.linear(x.float(), weight.float()).bfloat16())


def test_rows_that_are_no_numbers_leave_the_others_alone(in_tiles):
    """Tiles are whole: a row of NaN lies in one tile with others, and a panel ends within one."""
    x, weight = values(20, 70), values(70, 70, seed=1)
    packed = in_tiles.pack(weight.clone(), None)
    expected = packed.product(x, None)
    x[5], x[17, 3] = torch.nan, torch.inf
    found = packed.product(x, None)
    others = [row for row in range(20) if row not in (5, 17)]
    assert torch.equal(found[others], expected[others])
    assert found[5].isnan().all()
    assert not found[17].isfinite().any()
