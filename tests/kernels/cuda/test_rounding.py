"""Weights that are rounded while they are loaded, and int8 with a scale for each row."""

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.kernels.coded import CodedWeight, units_of
from mmdeploy_llm.layers import GatedMLP
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.install import install_kernels
from mmdeploy_llm.testing.tiny import randomize_empty
from mmdeploy_llm.values.options.weight_formats import FORMATS

GROUPED = [row.name for row in FORMATS.values() if row.group_size is not None]


@pytest.fixture(scope="module")
def rounder():
    try:
        return native.load()
    except native.BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.fixture(scope="module")
def rounding(triton_device, rounder):
    """The kernels as an engine with `quantization` has them."""
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    return CudaKernels(triton_device, rounder)


def values(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("quantization", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "k"), [(40, 200), (9, 50)])
def test_codes_are_those_of_the_cpu(rounding, rounder, triton_device, quantization, dtype, n, k):
    """Few rows times the same codes; many rows, for which they are dequantised."""
    weight = values(n, k).to(dtype)
    expected = rounder.rounded(weight, FORMATS[quantization]).with_offsets()
    packed = rounding.pack(weight.to(triton_device), quantization)
    codes = packed._codes
    assert torch.equal(codes.data.cpu(), expected.units.view(torch.uint8))
    assert torch.equal(codes.scales.cpu(), expected.scales)
    assert torch.equal(codes.offsets.cpu(), expected.offsets)
    for num_rows in (3, 40):
        x = values(num_rows, k)
        found = packed.product(x.to(triton_device), None).cpu()
        torch.testing.assert_close(found, F.linear(x, expected.dequantize()), rtol=1e-4, atol=1e-4)


def rounded_rows(x):
    """Rounds x as many rows are rounded: codes, and the scale of each row."""
    scales = x.abs().amax(-1, keepdim=True) / 127
    return (x / scales + 0.5).floor(), scales


@pytest.mark.full
@pytest.mark.parametrize(
    ("n", "k"), [(40, 200), pytest.param(136, 2056, marks=pytest.mark.full), (33, 64), (40, 70)]
)
def test_int8(rounding, rounder, triton_device, n, k):
    """Many rows are rounded too, where torch has a product of these sizes. A row of zeros has no
    largest value."""
    weight, bias = values(n, k), values(n)
    codes, (scales, shifts) = rounder.quantize_rows(weight)
    plain = codes.double() * scales.double()[:, None] + shifts.double()[:, None]
    packed = rounding.pack(weight.to(triton_device), "int8")
    for num_rows in (1, 17, 33):
        x = values(num_rows, k + 3)[:, 1 : k + 1]
        for own in (None, bias):
            on_device = None if own is None else own.to(triton_device)
            found = packed.product(x.to(triton_device), on_device).cpu()
            rows = x.double()
            if num_rows > 32 and n % 8 == k % 8 == 0:
                rows = torch.mul(*rounded_rows(x)).double()
            expected = F.linear(rows, plain, None if own is None else own.double())
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)
    empty = packed.product(torch.zeros(40, k, device=triton_device), bias.to(triton_device))
    assert torch.equal(empty.cpu(), bias.expand(40, n))


def test_rows_are_rounded_to_nearest(rounding, triton_device):
    from mmdeploy_llm.kernels.cuda.int8 import round_rows

    x = values(5, 3000)
    codes, scales, totals = round_rows(x.to(triton_device))
    expected, factors = rounded_rows(x)
    torch.testing.assert_close(scales.cpu(), factors[:, 0], rtol=1e-6, atol=0)
    sums = (codes.cpu().double() * scales.cpu()[:, None]).sum(1)
    torch.testing.assert_close(totals.cpu().double(), sums, rtol=1e-6, atol=1e-6)
    apart = (codes.cpu().float() - expected).abs()
    assert apart.max() <= 1  # where a division decides
    assert apart.mean() < 1e-3
    assert codes.max() == 127


def test_a_row_that_is_no_number_stays_so(rounding, triton_device):
    packed = rounding.pack(values(8, 64).to(triton_device), "int8")
    x = values(40, 64)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    found = packed.product(x.to(triton_device), None).cpu().isfinite()
    assert not found[3:5].any()
    assert found[:3].all()
    assert found[5:].all()


def test_stored_integers_with_a_scale_for_each_row(rounding, triton_device):
    """With rounded activations the codes of a checkpoint are multiplied as those that are rounded
    here; others are not, nor any without."""
    from mmdeploy_llm.kernels.cuda.codes import CudaCodes
    from mmdeploy_llm.kernels.cuda.int8 import Int8Rows

    codes = torch.randint(0, 256, (40, 64), dtype=torch.uint8)

    def stored(zero):
        zeros = torch.full((40, 1), zero, dtype=torch.uint8)
        units, scales = units_of(codes, 8), torch.rand(40, 1) + 0.5
        return CodedWeight(bits=8, k=64, group_size=64, units=units, scales=scales, zeros=zeros)

    weight, x = stored(128), values(33, 64).round()
    x[:, 0] = 127  # all scales are 1
    packed = rounding.pack_coded(weight, rounds=True)
    assert isinstance(packed, Int8Rows)
    found = packed.product(x.to(triton_device), None).cpu()
    torch.testing.assert_close(found, F.linear(x, weight.dequantize()), rtol=1e-6, atol=1e-3)
    assert isinstance(rounding.pack_coded(stored(128), rounds=False), CudaCodes)
    assert isinstance(rounding.pack_coded(stored(127), rounds=True), CudaCodes)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_stay_as_they_are_and_it_is_said(
    rounding, kernels, triton_device, caplog, quantization
):
    torch.manual_seed(0)
    experts = Experts(3, 32, 16)
    mlp = torch.nn.ModuleDict({"experts": experts, "dense": GatedMLP(32, 16)})
    randomize_empty(mlp)
    mlp.to(triton_device)
    before = experts.down_proj.clone()
    install_kernels(mlp, rounding, quantization)
    assert torch.equal(experts.down_proj, before)
    assert mlp.dense.down_proj.packed is not None
    assert f"quantization = '{quantization}' leaves 1 layers in the model's dtype" in caplog.text
    assert "such as experts" in caplog.text
    assert not kernels.can_pack(before[0], quantization)  # without a rounder
