"""Layers with states: the kernels equal plain torch, and do not depend on how a prompt is cut."""

from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.layers import GatedDeltaConfig, GatedDeltaNet, Mamba2, Mamba2Config
from mmdeploy_llm.layers.basic.norm import LateRMSNorm, LayerNorm, RMSNorm, ZeroCenteredRMSNorm
from mmdeploy_llm.layers.states.short_conv import GatedShortConv, ShortConv

from .test_kernels import DTYPES, values

COUNTS = (1, 1, 5, 70)  # tokens of each sequence; the states of single tokens are streamed
LAYER_NORMS = (
    {},
    {"has_bias": False, "is_centred": True},
    {"has_bias": False, "has_weight": False},
)


def context(counts, tensors, read=None, write=None, source=None, target=None):
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    num = len(counts)
    read, write = read or range(2, 2 + num), write or range(2 + num, 2 + 2 * num)
    return SimpleNamespace(
        read=torch.tensor(read),
        write=torch.tensor(write),
        source=torch.tensor(source or read),
        target=torch.tensor(target or write),
        starts=torch.tensor(starts),
        query_lens=tuple(counts),
        num_decode=sum(count == 1 for count in counts),
        tensors=lambda layer: tensors,
    )


def filled(module, dtype):
    for index, (name, param) in enumerate(module.named_parameters()):
        wide = name in ("A_log", "D", "dt_bias")
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
    for own in (TORCH, kernels):
        conv.kernels = own
        state = values(12, 300, taps - 1, dtype=dtype)
        found.append((conv(x, state, context(COUNTS, (state,))), state))
    (expected, state), (out, after) = found
    torch.testing.assert_close(out, expected, **limits(dtype))
    assert torch.equal(after, state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_short_conv(kernels, dtype):
    layer = filled(GatedShortConv(48, 3, 0, has_bias=True), dtype)
    x, found = values(sum(COUNTS), 48, dtype=dtype), []
    for own in (TORCH, kernels):
        for module in layer.modules():
            module.kernels = own
        found.append(layer(x, context(COUNTS, (values(12, 48, 2, dtype=dtype),))))
    allowed = limits(dtype)  # the sums are long: near 0, what was lost of their terms counts
    allowed["atol"] = max(allowed["atol"], allowed["rtol"] * float(found[0].abs().max()))
    torch.testing.assert_close(*found, **allowed)


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
    return layer, lambda: new_tensors(config.state, dtype)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(8, 16), (16, 48), (128, 128)])
def test_gated_delta(kernels, dtype, key_dim, value_dim):
    layer, new_states = a_layer(dtype, key_dim=key_dim, value_dim=value_dim)
    x = values(sum(COUNTS), 32, dtype=dtype)
    found = []
    for own in (TORCH, kernels):
        for module in layer.modules():
            module.kernels = own
        tensors = new_states()
        found.append((layer(x, context(COUNTS, tensors)), tensors))
    (expected, before), (out, after) = found
    scale = expected.abs().max().float()
    tolerance = 1e-3 if dtype is torch.float32 else 0.03  # torch adds chunks in another order
    assert ((out - expected).abs().max() / scale) < tolerance
    for ours, theirs in zip(after[:2], before[:2], strict=True):
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
        return kernels.gated_delta(layer._inputs(qkv, z, a, b), *tensors[1:], step)

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


def check_in_place(run, x, new_states, num_others):
    """Compares 14 tokens in steps, beside num_others sequences, with one step. Each step in place
    is computed twice, the first time in part of the heads as if it had failed in the middle; a step
    of guesses before it leaves no trace. run: of rows, tensors and a context."""

    def steps(part, tensors, read, write, source, target):
        """Returns the rows of one sequence's step; single tokens are beside others."""
        count = num_others if len(part) == 1 else 0
        step = context(
            (len(part), *(1 for _ in range(count))),
            tensors,
            read=[read, *[0] * count],
            write=[write, *range(8, 8 + count)],
            source=[source, *[0] * count],
            target=[target, *range(8, 8 + count)],
        )
        return run(torch.cat([part, x[:count]]), tensors, step)[: len(part)]

    whole, cut = new_states(), new_states()
    expected = run(x, whole, context((14,), whole))
    parts = [steps(x[:5], cut, 2, 3, 2, 3), steps(x[5:6], cut, 3, 4, 3, 5)]
    rows = 4, 3
    for at in range(6, 12):
        steps(x[at : at + 2].flip(0), cut, rows[0], 6, 5, 7)  # guesses, which are wrong
        before = [tensor.clone() for tensor in cut]
        steps(x[at : at + 1], cut, *rows, 5, 5)
        for tensor, earlier in zip(cut[1:], before[1:], strict=True):
            tensor[:, :2] = earlier[:, :2]  # heads that the step that failed did not reach
        parts.append(steps(x[at : at + 1], cut, *rows, 5, 5))
        rows = rows[::-1]
    parts.append(steps(x[12:], cut, rows[0], 6, 5, 7))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(cut[1][7], whole[1][3])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 48), (16, 64), (128, 128)])
@pytest.mark.parametrize("num_others", [0, 4])
def test_matrices_that_change_in_place(kernels, dtype, key_dim, value_dim, num_others):
    """Steps of one token have the bits of a prompt in one piece, beside any other sequences."""
    layer, new_states = a_layer(dtype, key_dim=key_dim, value_dim=value_dim)
    channels, heads, size = 4 * key_dim + 4 * value_dim, 4, 4 * value_dim
    x = values(14, channels + size + 2 * heads, dtype=dtype)

    def run(part, tensors, step):
        qkv, z, a, b = part.split([channels, size, heads, heads], 1)
        return kernels.gated_delta(layer._inputs(qkv, z, a, b), *tensors[1:], step)

    check_in_place(run, x, new_states, num_others)


def a_mamba(dtype, *, head_dim, state_size, heads=4, groups=2, **options):
    config = Mamba2Config(
        hidden_size=32,
        num_heads=heads,
        head_dim=head_dim,
        state_size=state_size,
        num_groups=groups,
        kernel_size=4,
        norm_eps=1e-6,
        **options,
    )
    layer = filled(Mamba2(config, 0), dtype)
    return layer, lambda: new_tensors(config.state, dtype)


def new_tensors(state, dtype):
    conv, matrices, last = ((12, *shape) for shape in state.shapes)
    wide = values(*matrices, dtype=torch.float32)
    return [values(*conv, dtype=dtype), wide, torch.zeros(last)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "state_size", "groups"), [(16, 8, 1), (48, 17, 2), (64, 128, 4), (256, 256, 1)]
)
@pytest.mark.parametrize("counts", [COUNTS, (1, 1, 1, 1, 1)], ids=["mixed", "decode"])
def test_mamba2(kernels, dtype, head_dim, state_size, groups, counts):
    layer, new_states = a_mamba(
        dtype,
        head_dim=head_dim,
        state_size=state_size,
        groups=groups,
        time_step_limit=(0.1, 1.5),
        has_norm=groups != 2,
    )
    x = values(sum(counts), 32, dtype=dtype)
    found = []
    for own in (TORCH, kernels):
        for module in layer.modules():
            module.kernels = own
        tensors = new_states()
        found.append((layer(x, context(counts, tensors)), tensors))
    (expected, before), (out, after) = found
    scale = expected.abs().max().float()
    tolerance = 1e-3 if dtype is torch.float32 else 0.03  # torch adds chunks in another order
    assert ((out - expected).abs().max() / scale) < tolerance
    for ours, theirs in zip(after[:2], before[:2], strict=True):
        error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
        assert error < (1e-5 if ours.dtype is torch.float32 and dtype is torch.float32 else 0.03)


def test_mamba2_by_its_recurrence(kernels):
    """One token after the other in float64."""
    layer, new_states = a_mamba(torch.float32, head_dim=32, state_size=24)
    inner, shared, count = 4 * 32, 2 * 24, 11
    parts = values(count, 2 * inner + 2 * shared + 4, dtype=torch.float32).split(
        [inner + 2 * shared, inner, 4], 1
    )
    inputs, tensors = layer._inputs(*parts), new_states()
    out = kernels.mamba2(inputs, *tensors[1:], context((count,), tensors))
    x, b, c = inputs.rows.double().split([inner, shared, shared], 1)
    x, b, c = x.view(count, 4, 32), b.view(count, 2, 24), c.view(count, 2, 24)
    dt = torch.nn.functional.softplus(inputs.dt.double() + layer.dt_bias)
    state = new_states()[1][2].double()
    for t in range(count):
        keys, queries = (y[t].repeat_interleave(2, 0) for y in (b, c))
        decay = (-layer.A_log.double().exp() * dt[t]).exp()
        state = state * decay[:, None, None] + keys[..., None] * (x[t] * dt[t, :, None])[:, None]
        y = (queries[:, None] @ state)[:, 0] + layer.D.double()[:, None] * x[t]
        expected = layer.norm(y.flatten()[None].float(), inputs.z[t : t + 1])[0]
        torch.testing.assert_close(out[t], expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(tensors[1][3], state.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_of_mamba2_in_steps_has_the_same_bits(kernels, dtype):
    """Also beside other sequences, whose number chooses how matrices are written."""
    layer, new_states = a_mamba(dtype, head_dim=32, state_size=24)
    inner, shared = 4 * 32, 2 * 24
    x = values(40, 2 * inner + 2 * shared + 4, dtype=dtype)

    def run(part, tensors, step):
        rows, z, dt = part.split([inner + 2 * shared, inner, 4], 1)
        return kernels.mamba2(layer._inputs(rows, z, dt), *tensors[1:], step)

    whole_states, cut_states = new_states(), new_states()
    whole = run(x, whole_states, context((40,), whole_states))
    rows, parts = (2, 3), []
    for part in x.split([1, 6, 31, 1, 1]):
        others = x[:3] if len(part) == 1 else x[:0]
        counts = (len(part), *(1 for _ in others))
        read, write = [rows[0], 4, 5, 6][: len(counts)], [rows[1], 7, 8, 9][: len(counts)]
        step = context(counts, cut_states, read=read, write=write)
        parts.append(run(torch.cat([part, others]), cut_states, step)[: len(part)])
        rows = rows[::-1]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(cut_states[1][rows[0]], whole_states[1][3])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "state_size"), [(48, 17), (64, 128)])
@pytest.mark.parametrize("num_others", [0, 4])
def test_matrices_of_mamba2_that_change_in_place(kernels, dtype, head_dim, state_size, num_others):
    layer, new_states = a_mamba(dtype, head_dim=head_dim, state_size=state_size)
    sizes = 4 * head_dim + 4 * state_size, 4 * head_dim, 4
    x = values(14, sum(sizes), dtype=dtype)

    def run(part, tensors, step):
        return kernels.mamba2(layer._inputs(*part.split(sizes, 1)), *tensors[1:], step)

    check_in_place(run, x, new_states, num_others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 171])
@pytest.mark.parametrize("kind", [ZeroCenteredRMSNorm, LateRMSNorm])
def test_centred_norm(kernels, dtype, size, kind):
    norm = filled(kind(size, 1e-6), dtype)
    x, residual = values(9, size, dtype=dtype), values(9, size, dtype=dtype, seed=3)
    expected, total = norm.add(x, residual.clone())
    alone = norm(x)
    norm.kernels = kernels
    found, own = norm.add(x, residual.clone())
    torch.testing.assert_close(found, expected, **limits(dtype))
    torch.testing.assert_close(norm(x), alone, **limits(dtype))
    assert torch.equal(own, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 24, 171])
@pytest.mark.parametrize("options", LAYER_NORMS, ids=str)
def test_layer_norm(kernels, dtype, size, options):
    """The sum of a joined call has the bits of torch's, the norm those of a call without it."""
    norm = filled(LayerNorm(size, 1e-5, **options), dtype)
    x, residual = values(9, size, dtype=dtype) + 3, values(9, size, dtype=dtype, seed=3)
    expected, total = norm.add(x, residual.clone())
    norm.kernels = kernels
    found, own = norm.add(x, residual.clone())
    torch.testing.assert_close(found, expected, **limits(dtype))
    assert torch.equal(own, total)
    assert torch.equal(found, norm(total))
    wide = torch.cat([x, x], 1)[:, :size]
    assert torch.equal(norm.add(wide, residual.clone())[0], found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 256])
def test_centred_norm_of_heads(kernels, dtype, size):
    """Every second head is normed, with the bits of a norm over rows; the others stay."""
    norm = filled(ZeroCenteredRMSNorm(size, 1e-6), dtype)
    x = values(7, 6, size, dtype=dtype)
    heads, kept = x[:, ::2], x[:, 1::2].clone()
    rows = heads.reshape(-1, size)
    expected, exact = norm(rows), kernels.rms_norm(rows, norm.weight, norm.eps, None, 1.0)
    kernels.norm_heads(heads, norm.weight, norm.eps, norm.centre)
    found = heads.reshape(-1, size)
    torch.testing.assert_close(found, expected, **limits(dtype))
    assert torch.equal(found, exact)
    assert torch.equal(x[:, 1::2], kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 30, 256])
def test_norm_of_heads_without_a_weight(kernels, dtype, size):
    """Every second head is normed, into memory of its own, with the bits of weights of one."""
    x = values(7, 6, size, dtype=dtype)
    before, heads = x.clone(), x[:, 1::2]
    rows, ones = heads.reshape(-1, size), torch.ones(size, dtype=dtype)
    found = kernels.normed_heads(heads, 1e-6)
    wide = heads.float()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(found, expected.to(dtype), **limits(dtype))
    assert torch.equal(found.view(-1, size), kernels.rms_norm(rows, ones, 1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_factor", [True, False])
@pytest.mark.parametrize("size", [1, 24, 171])
@pytest.mark.parametrize("kind", [RMSNorm, LateRMSNorm])
def test_norm_that_is_added(kernels, dtype, has_factor, size, kind):
    """In bf16 the sum has the bits of a norm, an addition and a product one after the other."""
    norm = filled(kind(size, 1e-6), dtype)
    factor = torch.tensor([0.37], dtype=dtype) if has_factor else None
    x, stream = values(9, 2 * size, dtype=dtype)[:, :size], values(9, size, dtype=dtype, seed=3)
    expected = norm.add_to(stream.clone(), x, factor)
    exact = stream + kernels.rms_norm(x, norm.weight, norm.eps, None, norm.centre)
    exact = exact if factor is None else exact * factor
    norm.kernels = kernels
    found = norm.add_to(stream, x, factor)
    assert found.data_ptr() == stream.data_ptr()
    assert dtype is torch.float32 or torch.equal(found, exact)
    torch.testing.assert_close(found, expected, **limits(dtype))


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
        test_matrices_that_change_in_place(kernels_of_level, dtype, 16, 48, 0)
        test_matrices_that_change_in_place(kernels_of_level, dtype, 128, 128, 4)
        test_mamba2(kernels_of_level, dtype, 48, 17, 2, COUNTS)
        test_mamba2(kernels_of_level, dtype, 64, 128, 4, (1, 1, 1, 1, 1))
        test_a_prompt_of_mamba2_in_steps_has_the_same_bits(kernels_of_level, dtype)
        test_matrices_of_mamba2_that_change_in_place(kernels_of_level, dtype, 64, 128, 4)
        test_centred_norm(kernels_of_level, dtype, 171, LateRMSNorm)
        test_layer_norm(kernels_of_level, dtype, 171, LAYER_NORMS[0])
        test_centred_norm_of_heads(kernels_of_level, dtype, 30)
        test_norm_of_heads_without_a_weight(kernels_of_level, dtype, 30)
        test_norm_that_is_added(kernels_of_level, dtype, True, 171, LateRMSNorm)
        test_gate_of_heads(kernels_of_level, dtype)
