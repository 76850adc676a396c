"""GPTQ changes the outputs for the inputs it has seen less than rounding to the nearest codes."""

from __future__ import annotations

import pytest
import torch

from mmdeploy_llm.checkpoints.quantize.gptq import (
    damped,
    factor_of,
    output_error,
    refined,
    round_by_factor,
    values_of,
)
from mmdeploy_llm.checkpoints.saving.rounding import SEARCHED, Scheme, best_ranges, round_groups
from mmdeploy_llm.errors import CheckpointError

SCHEME = Scheme(bits=4, group_size=32)


def made(num_inputs=500):
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(96, 96, generator=generator) * torch.rand(96, generator=generator)
    x = torch.randn(num_inputs, 96, generator=generator) @ mix
    return torch.randn(40, 96, generator=generator), x, x.T @ x


@pytest.mark.parametrize("num_inputs", [500, 20])  # fewer inputs than columns too
def test_outputs_change_less(num_inputs):
    weight, x, moments = made(num_inputs)
    ours = round_by_factor(weight, factor_of(moments), SCHEME)
    nearest = round_groups(weight, SCHEME)
    assert output_error(weight, ours, moments) < 0.7 * output_error(weight, nearest, moments)
    wrong = x @ (values_of(ours.codes, ours.scales, ours.zeros) - weight).T
    assert output_error(weight, ours, moments) == pytest.approx(
        float(wrong.square().sum()), rel=1e-3
    )


def test_columns_without_inputs_are_rounded_to_the_nearest_codes():
    weight, _, moments = made()
    groups = weight.view(len(weight), 3, 32)
    scales, zeros = best_ranges(groups, SCHEME, torch.ones(3, 32))
    steps = (groups / scales.float()[..., None]).round() + zeros[..., None]
    codes = steps.clamp(0, 15).to(torch.uint8).view_as(weight)
    unseen = round_by_factor(weight, factor_of(torch.zeros(96, 96)), SCHEME)
    assert torch.equal(unseen.codes, codes)
    assert unseen.squared_error <= round_groups(weight, SCHEME).squared_error
    moments[:, 32:64] = moments[32:64] = 0
    partly = round_by_factor(weight, factor_of(moments), SCHEME)
    assert torch.equal(partly.codes[:, 32:64], codes[:, 32:64])
    assert not torch.equal(partly.codes[:, 64:], codes[:, 64:])


def test_ranges_are_chosen_by_what_errors_count():
    """Against a plain loop over all cuts of both ends."""
    weight, _, _ = made()
    groups = weight.view(-1, 3, 32)
    counts = torch.rand(3, 32, generator=torch.Generator().manual_seed(1)) ** 4
    found = best_ranges(groups, SCHEME, counts)

    def error(scales, zeros):
        scale, zero = scales.float()[..., None], zeros[..., None]
        values = (((groups / scale).round() + zero).clamp(0, 15) - zero) * scale
        return ((values - groups).square() * counts).sum(-1)

    low, high = groups.amin(-1), groups.amax(-1)
    best = torch.full(low.shape, float("inf"))
    for first in SEARCHED:
        for last in SEARCHED:
            scales = ((high * last - low * first) / 15).bfloat16()
            zeros = (-low * first / scales.float()).round().clamp(0, 15)
            best = best.minimum(error(scales, zeros))
    assert torch.allclose(error(*found), best, rtol=1e-4)
    assert (error(*found) <= error(*best_ranges(groups, SCHEME)) * (1 + 1e-4)).float().mean() > 0.8


def test_scales_of_rows_are_those_of_weights_of_their_own():
    """Rows with different scales of columns are rounded as each with its own factor."""
    weight, _, moments = made()
    factor = factor_of(moments)
    scales = torch.stack([torch.linspace(0.5, 2, 96), torch.linspace(3, 0.2, 96)])
    rows = scales.repeat_interleave(len(weight), 0)
    together = round_by_factor(weight.repeat(2, 1), factor, SCHEME, rows)
    for own, codes in zip(scales, together.codes.chunk(2), strict=True):
        alone = round_by_factor(weight * own, factor * own, SCHEME)
        assert (codes == alone.codes).float().mean() > 0.999


def test_inputs_that_are_not_finite():
    weight, _, moments = made()
    with pytest.raises(CheckpointError, match="not finite"):
        round_by_factor(weight, factor_of(moments * float("nan")), SCHEME)


SCHEMES = [
    Scheme(bits=4, group_size=16),
    Scheme(bits=4, group_size=16, is_symmetric=True),
    Scheme(bits=8, group_size=32),
    Scheme(bits=4, group_size=1000),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_inputs", [500, 20])
def test_refined_codes_and_scales_change_outputs_less(scheme, num_inputs):
    torch.manual_seed(3)
    weight, by = torch.randn(24, 64), torch.rand(64) + 0.5
    inputs = torch.randn(num_inputs, 64) @ torch.randn(64, 64)
    weight[3, :16] = 0
    moments = inputs.T @ inputs
    moments[7], moments[:, 7] = 0, 0  # a column without inputs
    before = round_by_factor(weight, factor_of(moments), scheme, by)
    after = refined(weight, before, moments, scheme, by)
    own = damped(moments, 0.01) / by / by[:, None]

    def errors(rounded):
        lost = values_of(rounded.codes, rounded.scales, rounded.zeros) - weight * by
        return ((lost @ own) * lost).sum(1)

    assert (errors(after) <= errors(before) * 1.001).all()
    assert errors(after).sum() < (0.95 if scheme.bits == 4 else 1) * errors(before).sum()
    assert int(after.codes.max()) < 2**scheme.bits
    assert torch.equal(after.zeros, before.zeros)
    assert (after.scales * before.scales >= 0).all()
    assert after.scales.dtype is torch.bfloat16


def test_no_single_code_of_a_refined_weight_could_be_better(monkeypatch):
    monkeypatch.setattr("mmdeploy_llm.checkpoints.quantize.gptq.PASSES", 50)
    torch.manual_seed(4)
    scheme = Scheme(bits=4, group_size=8)
    weight, inputs = torch.randn(5, 16), torch.randn(40, 16) @ torch.randn(16, 16)
    moments = inputs.T @ inputs
    found = refined(weight, round_groups(weight, scheme), moments, scheme)
    own = damped(moments, 0.01)

    def error(codes):
        lost = values_of(codes, found.scales, found.zeros) - weight
        return ((lost @ own) * lost).sum(1)

    least = error(found.codes)
    for column in range(16):
        for code in range(16):
            codes = found.codes.clone()
            codes[:, column] = code
            assert (error(codes) >= least * (1 - 1e-5)).all()
