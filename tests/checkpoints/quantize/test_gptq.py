"""GPTQ changes the outputs for the inputs it has seen less than rounding to the nearest codes."""

from __future__ import annotations

import pytest
import torch

from mmdeploy_llm.checkpoints.quantize.gptq import (
    factor_of,
    output_error,
    round_by_factor,
    values_of,
)
from mmdeploy_llm.checkpoints.saving.rounding import Scheme, round_groups
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
    nearest = round_groups(weight, SCHEME)
    unseen = round_by_factor(weight, factor_of(torch.zeros(96, 96)), SCHEME)
    assert torch.equal(unseen.codes, nearest.codes)
    moments[:, 32:64] = moments[32:64] = 0
    partly = round_by_factor(weight, factor_of(moments), SCHEME)
    assert torch.equal(partly.codes[:, 32:64], nearest.codes[:, 32:64])
    assert not torch.equal(partly.codes[:, 64:], nearest.codes[:, 64:])


def test_inputs_that_are_not_finite():
    weight, _, moments = made()
    with pytest.raises(CheckpointError, match="not finite"):
        round_by_factor(weight, factor_of(moments * float("nan")), SCHEME)
