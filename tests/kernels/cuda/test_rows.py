"""Norms, activations and rotary embedding, compared with plain torch."""

import pytest
import torch
import torch.nn.functional as F

from mmdeploy_llm.kernels.plain import _rms_norm
from mmdeploy_llm.layers import RMSNorm, Rotary, RotaryConfig
from mmdeploy_llm.layers.install import install_kernels

SHAPES = [
    (1, 8),
    (3, 100),
    (37, 128),
    pytest.param((5, 24), marks=pytest.mark.full),
    pytest.param((2, 1536), marks=pytest.mark.full),
]


@pytest.fixture
def make(triton_device):
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(triton_device, dtype)

    return make


@pytest.mark.one_is_quick
@pytest.mark.parametrize("shape", SHAPES)
def test_norm(kernels, dtypes, make, assert_near, shape):
    for dtype in dtypes:
        num_rows, size = shape
        x, weight = make(num_rows, 2 * size, dtype=dtype)[:, size:], make(size, dtype=dtype)
        before = x.clone()
        assert_near(kernels.rms_norm(x, weight, 1e-6), _rms_norm(x, weight, 1e-6))
        assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_with_residual(kernels, dtypes, make, assert_near, shape):
    for dtype in dtypes:
        x, residual, weight = (make(*s, dtype=dtype) for s in (shape, shape, shape[1:]))
        expected = residual + x
        found = kernels.rms_norm(x, weight, 1e-6, residual)
        assert torch.equal(residual, expected)
        assert_near(found, _rms_norm(expected, weight, 1e-6))


@pytest.mark.one_is_quick
@pytest.mark.parametrize("shape", [*SHAPES, pytest.param((2, 2500), marks=pytest.mark.full)])
def test_silu_mul(kernels, dtypes, make, assert_near, shape):
    for dtype in dtypes:
        gate, up = make(shape[0], 2 * shape[1], dtype=dtype).chunk(2, -1)
        assert_near(kernels.silu_mul(gate, up), F.silu(gate) * up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_values_beyond_exp(kernels, make):
    """exp overflows for these values, but the result does not."""
    gate = make(1, 4).fill_(-1.0) * torch.tensor([1.0, 90.0, 200.0, 1e4], device=make(1).device)
    expected = F.silu(gate) * 2
    torch.testing.assert_close(kernels.silu_mul(gate, torch.full_like(gate, 2.0)), expected)


@pytest.mark.full
@pytest.mark.parametrize("is_interleaved", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, None), (16, 8), (24, None), (80, 48)])
@pytest.mark.parametrize("axes", [3, pytest.param(None, marks=pytest.mark.full)])
def test_rotary(
    kernels, dtypes, make, triton_device, assert_near, is_interleaved, head_dim, rotary_dim, axes
):
    """They are rotated in place on a slice of a wider tensor, with and without norms of the heads
    before it, with and without M-RoPE."""
    num_pairs = (rotary_dim or head_dim) // 2
    config = RotaryConfig(
        head_dim=head_dim,
        is_interleaved=is_interleaved,
        rotary_dim=rotary_dim,
        axes=None if axes is None else tuple(i % axes for i in range(num_pairs)),
        scale=1.3,
    )
    plain, fast = Rotary(config), Rotary(config)
    install_kernels(fast, kernels)
    for rotary in (plain, fast):
        rotary.init_buffers(triton_device)
    positions = torch.randint(0, 50, (7,) if axes is None else (axes, 7), device=triton_device)
    for dtype in dtypes:
        wide = make(7, 6, head_dim, dtype=dtype)
        norms = [RMSNorm(head_dim, 1e-6).to(triton_device, dtype) for _ in range(2)]
        for norm in norms:
            norm.weight.data = make(head_dim, dtype=dtype)
        expected = plain(positions).rotate(wide[:, :5].clone())
        normed = plain(positions).norm_and_rotate(wide[:, :5].clone(), 3, *norms)
        for wanted, own_norms in ((expected, ()), (normed, (3, *norms))):
            own, rope = wide.clone(), fast(positions)
            step = rope.norm_and_rotate if own_norms else rope.rotate
            found = step(own[:, :5], *own_norms)
            assert found.data_ptr() == own.data_ptr()
            assert_near(found, wanted)
            assert torch.equal(own[:, 5], wide[:, 5])


def test_takes(kernels, make, triton_device):
    x = make(4, 8)
    assert kernels.takes(x, x[:, :3])
    assert not kernels.takes(x, x.half())
    assert not kernels.takes(x.double())
    assert not kernels.takes(x.T)
    assert not kernels.takes(torch.zeros(3, device="meta"))
