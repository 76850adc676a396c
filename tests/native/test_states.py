"""Layers with states: the kernels equal plain torch, and do not depend on how a prompt is cut."""

from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.basic_layers.norm import ZeroCenteredRMSNorm
from mmdeploy_llm.layers import GatedDeltaConfig, GatedDeltaNet
from mmdeploy_llm.layers.states.short_conv import ShortConv

from .test_kernels import DTYPES, values

COUNTS = (1, 1, 5, 70)  # tokens of each sequence; the states of single tokens are streamed


def context(counts, tensors, read=None, write=None):
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    num = len(counts)
    return SimpleNamespace(
        read=torch.tensor(read or range(2, 2 + num)),
        write=torch.tensor(write or range(2 + num, 2 + 2 * num)),
        starts=torch.tensor(starts),
        query_lens=tuple(counts),
        num_decode=sum(count == 1 for count in counts),
        tensors=lambda layer: tensors,
    )


def filled(module, dtype):
    for index, (name, param) in enumerate(module.named_parameters()):
        wide = name in ("A_log", "dt_bias")
        own = values(*param.shape, dtype=torch.float32 if wide else dtype, seed=index)
        setattr_deep(module, name, own * (0.3 if param.dim() > 1 else 1))
    return module.eval()


def setattr_deep(module, name, value):
    path, _, own = name.rpartition(".")
    setattr(module.get_submodule(path), own, torch.nn.Parameter(value, requires_grad=False))


def limits(dtype):
    return {"atol": 2e-5, "rtol": 2e-5} if dtype is torch.float32 else {"atol": 0.06, "rtol": 0.03}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize(("has_silu", "has_bias"), [(True, False), (False, True), (True, True)])
def test_short_conv(kernels, dtype, taps, has_silu, has_bias):
    conv = filled(ShortConv(300, taps, has_silu=has_silu, has_bias=has_bias), dtype)
    x = values(sum(COUNTS), 310, dtype=dtype)[:, 5:305]
    found = []
    for own in (None, kernels):
        conv.kernels = own
        state = values(12, 300, taps - 1, dtype=dtype)
        found.append((conv(x, state, context(COUNTS, (state,))), state))
    (expected, state), (out, after) = found
    torch.testing.assert_close(out, expected, **limits(dtype))
    assert torch.equal(after, state)


def a_layer(dtype, *, key_dim, value_dim, key_heads=2, value_heads=4):
    config = GatedDeltaConfig(
        hidden_size=32,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        kernel_size=4,
        norm_eps=1e-6,
    )
    layer = filled(GatedDeltaNet(config, 0), dtype)
    shapes = [(12, *shape) for shape in config.state.shapes]
    dtypes = (dtype, torch.float32)
    return layer, lambda: [
        values(*shape, dtype=own) for shape, own in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 16), (16, 48), (128, 128)])
def test_gated_delta(kernels, dtype, key_dim, value_dim):
    layer, new_states = a_layer(dtype, key_dim=key_dim, value_dim=value_dim)
    x = values(sum(COUNTS), 32, dtype=dtype)
    found = []
    for own in (None, kernels):
        for module in layer.modules():
            module.kernels = own
        tensors = new_states()
        found.append((layer(x, context(COUNTS, tensors)), tensors))
    (expected, before), (out, after) = found
    scale = expected.abs().max().float()
    tolerance = 1e-3 if dtype is torch.float32 else 0.03  # torch adds chunks in another order
    assert ((out - expected).abs().max() / scale) < tolerance
    for ours, theirs in zip(after, before, strict=True):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_in_steps_has_the_same_bits(kernels, dtype):
    """The test leaves the projections out, whose products are torch's at some levels."""
    layer, new_states = a_layer(dtype, key_dim=16, value_dim=32)
    taps, heads, channels = layer.conv1d.weight, 4, 2 * 2 * 16 + 4 * 32
    x = values(40, channels + 4 * 32 + 2 * heads, dtype=dtype)

    def run(part, tensors, step):
        qkv, z, a, b = part.split([channels, 4 * 32, heads, heads], 1)
        qkv = kernels.short_conv(qkv, taps, None, tensors[0], step, has_silu=True)
        return kernels.gated_delta(layer._inputs(qkv, z, a, b), tensors[1], step)

    whole_states, cut_states = new_states(), new_states()
    whole = run(x, whole_states, context((40,), whole_states))
    rows, parts = (2, 3), []
    for part in x.split([1, 6, 32, 1]):
        step = context((len(part),), cut_states, read=[rows[0]], write=[rows[1]])
        parts.append(run(part, cut_states, step))
        rows = rows[::-1]
    assert torch.equal(torch.cat(parts), whole)
    for ours, theirs in zip(cut_states, whole_states, strict=True):
        assert torch.equal(ours[rows[0]], theirs[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 171])
def test_centred_norm(kernels, dtype, size):
    norm = filled(ZeroCenteredRMSNorm(size, 1e-6), dtype)
    x, residual = values(9, size, dtype=dtype), values(9, size, dtype=dtype, seed=3)
    expected, total = norm.add(x, residual.clone())
    alone = norm(x)
    norm.kernels = kernels
    found, own = norm.add(x, residual.clone())
    torch.testing.assert_close(found, expected, **limits(dtype))
    torch.testing.assert_close(norm(x), alone, **limits(dtype))
    assert torch.equal(own, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 256])
def test_centred_norm_of_heads(kernels, dtype, size):
    """Every second head is normed, with the bits of a norm over rows; the others stay."""
    norm = filled(ZeroCenteredRMSNorm(size, 1e-6), dtype)
    x = values(7, 6, size, dtype=dtype)
    heads, kept = x[:, ::2], x[:, 1::2].clone()
    rows = heads.reshape(-1, size)
    expected, exact = norm(rows), kernels.centred_norm(rows, norm.weight, norm.eps)
    kernels.centred_norm_heads(heads, norm.weight, norm.eps)
    found = heads.reshape(-1, size)
    torch.testing.assert_close(found, expected, **limits(dtype))
    assert torch.equal(found, exact)
    assert torch.equal(x[:, 1::2], kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_heads(kernels, dtype):
    x, both = values(9, 3, 40, dtype=dtype), 5 * values(9, 6, 40, dtype=dtype, seed=1)
    gate = both[:, 1::2]
    gate[0, 0, :4] = torch.tensor([200.0, -200.0, 0.0, float("nan")])
    expected = x * gate.sigmoid()
    found = kernels.gate_heads(x, gate)
    assert found.data_ptr() == x.data_ptr()
    close = {"atol": 1e-6, "rtol": 1e-6} if dtype is torch.float32 else {"atol": 0, "rtol": 0.01}
    torch.testing.assert_close(found, expected, **close, equal_nan=True)


def test_every_level(kernels_of_level):
    for dtype in DTYPES:
        test_short_conv(kernels_of_level, dtype, 4, True, True)
        test_gated_delta(kernels_of_level, dtype, 16, 48)
        test_gated_delta(kernels_of_level, dtype, 128, 128)
        test_a_prompt_in_steps_has_the_same_bits(kernels_of_level, dtype)
        test_centred_norm(kernels_of_level, dtype, 171)
        test_centred_norm_of_heads(kernels_of_level, dtype, 30)
        test_gate_of_heads(kernels_of_level, dtype)
