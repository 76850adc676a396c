"""Products with weights of few bits, compared with plain torch on the dequantised weight."""

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout, units_of


@pytest.fixture
def make(triton_device):
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(shape, generator=generator).to(triton_device)

    return make


def coded_weight(n, k, kind, group_size, *, has_zeros=True, columns=None):
    """kind: bits of integers, or "float8", whose codes are all numbers."""
    is_float8, bits = kind == "float8", 8 if kind == "float8" else kind
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8)
    shape = n, -(-k // group_size)
    scales = (torch.rand(shape, generator=generator) + 0.5) / 2**bits
    zeros = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    if is_float8:
        codes[codes & 127 == 127] = 0
        zeros.zero_()
    return CodedWeight(
        is_float8=is_float8,
        bits=bits,
        k=k,
        group_size=group_size,
        units=units_of(codes, bits),
        scales=scales,
        zeros=zeros if has_zeros else None,
        offsets=None if has_zeros else scales * zeros + 0.01,
        columns=columns,
    )


CASES = [  # n, k, bits or "float8", group_size
    (5, 64, 4, 32),
    (70, 200, 4, 64),
    (33, 256, 4, 128),
    (40, 96, 4, 96),
    (33, 90, 4, 90),
    (9, 300, 4, 300),
    (5, 48, 8, 16),
    (70, 200, 8, 64),
    (33, 256, 8, 128),
    (9, 301, 8, 301),
    (70, 200, "float8", 64),
    (33, 256, "float8", 128),
    (9, 301, "float8", 301),
]
CASES = [(case, True) for case in CASES] + [(case, False) for case in CASES if case[2] != "float8"]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("case", "has_zeros"), CASES, ids=str)
def test_products(kernels, make, triton_device, case, has_zeros):
    """Few rows, which read the codes, and many, for which the weight is dequantised."""
    n, k, _, _ = case
    weight = coded_weight(*case, has_zeros=has_zeros)
    assert kernels.can_pack_coded(weight.layout, (n, k))
    plain = weight.dequantize().to(triton_device)
    packed = kernels.pack_coded(weight, rounds=False)
    for num_rows in (1, 17, 33):
        x, bias = make(num_rows, k + 3)[:, 1 : k + 1], make(n)
        for own in (None, bias):
            found = packed.product(x, own)
            expected = F.linear(x.double(), plain.double(), None if own is None else own.double())
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed.dequantized(torch.float32), plain, rtol=1e-6, atol=1e-5)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_8_bit_floats(kernels, triton_device, dtype):
    """Each of the 256 codes is exactly its value, NaN included, in products and dequantised."""
    codes = torch.zeros(256, 16, dtype=torch.uint8)
    codes[:, 0] = torch.arange(256)
    weight = CodedWeight(
        bits=8,
        k=16,
        group_size=16,
        units=units_of(codes, 8),
        scales=torch.ones(256, 1),
        zeros=torch.zeros(256, 1, dtype=torch.uint8),
        is_float8=True,
    )
    expected = codes[:, 0].view(torch.float8_e4m3fn).float()
    assert expected.isnan().sum() == 2
    packed = kernels.pack_coded(weight, rounds=False)
    first = torch.eye(16, dtype=dtype, device=triton_device)[:1]
    for found in (packed.dequantized(dtype)[:, 0], packed.product(first, None)[0]):
        torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(("case", "has_zeros"), CASES, ids=str)
def test_rows(kernels, triton_device, case, has_zeros):
    """Rows that are looked up are those of the dequantised weight, in the order of its columns."""
    columns = torch.randperm(case[1])
    for weight in (
        coded_weight(*case, has_zeros=has_zeros),
        coded_weight(*case, has_zeros=has_zeros, columns=columns),
    ):
        indices = torch.tensor([case[0] - 1, 0, 3, 3])
        expected = weight.with_offsets().dequantize()[indices].to(triton_device, torch.bfloat16)
        packed = kernels.pack_coded(weight, rounds=False)
        found = packed.rows(indices.to(triton_device), torch.bfloat16)
        assert torch.equal(found, expected)


def test_float16(kernels, make):
    weight = coded_weight(70, 256, 4, 64, has_zeros=True)
    x = make(3, 256).half()
    found = kernels.pack_coded(weight, rounds=False).product(x, None)
    expected = F.linear(x.double(), weight.dequantize().double().to(x.device))
    assert found.dtype is torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-2)


def test_codes_in_another_order(kernels, make, triton_device):
    weight = coded_weight(33, 128, 4, 32, has_zeros=True, columns=torch.randperm(128))
    packed = kernels.pack_coded(weight, rounds=False)
    for num_rows in (2, 40):
        x = make(num_rows, 128)
        expected = F.linear(x.double(), weight.dequantize().double().to(triton_device))
        found = packed.product(x, None).double()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_no_bit_depends_on_the_company(kernels, make, triton_device):
    """Among few rows, each is added in one order. The interpreter multiplies tiles with NumPy,
    whose order may depend on a row's place in its tile, so that rows keep their places there."""
    weight = coded_weight(40, 256, 4, 64, has_zeros=True)
    packed = kernels.pack_coded(weight, rounds=False)
    x = make(20, 256)
    together = packed.product(x, None)
    for row in (0, 7, 19):
        others = make(32, 256)
        others[row] = x[row]
        assert torch.equal(packed.product(others, None)[row], together[row])
        if triton_device.type == "cuda":
            assert torch.equal(packed.product(x[row : row + 1], None)[0], together[row])


@pytest.mark.parametrize(
    ("bits", "group_size", "shape"),
    [(4, 16, (8, 64)), (4, 40, (8, 80)), (8, 8, (8, 64)), (4, 64, (2, 8, 128))],
)
def test_what_is_dequantised_at_load(kernels, bits, group_size, shape):
    """Groups that no tile divides, and experts."""
    assert not kernels.can_pack_coded(CodeLayout(bits=bits, group_size=group_size), shape)
