"""The sampling kernels return exactly the values and tokens of plain torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmdeploy_llm.sampling.draw import draw
from mmdeploy_llm.sampling.draw_params import DrawParams
from mmdeploy_llm.sampling.largest import first_argmax
from mmdeploy_llm.sampling.sure_draw import draw_surely

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (65, 127, 1000, 1024, 33_000, 151_936)


def logits_of(num_rows, vocab_size, dtype=torch.float32, seed=0):
    """Returns flat and steep rows, with equal values and banned tokens."""
    generator = torch.Generator().manual_seed(seed)
    spreads = torch.linspace(0, 12, num_rows)[:, None]
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spreads
    logits[:, :: vocab_size // 7] = -torch.inf
    return logits.to(dtype)


def params_of(num_rows, seed):
    """Returns all combinations of rules that the rows can hold."""
    random = np.random.default_rng(seed)
    uniforms = random.random(num_rows)
    uniforms[:2] = 0.0, 1 - 2.0**-53
    return DrawParams(
        temperature=random.choice([0.3, 1.0, 1.9], num_rows).astype(np.float32),
        top_k=random.choice([0, 0, 1, 40, 64, 500], num_rows),
        top_p=random.choice([1.0, 1.0, 0.0, 0.5, 0.99], num_rows),
        min_p=random.choice([0.0, 0.0, 0.1, 1.0], num_rows),
        uniforms=uniforms,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "vocab_size", [pytest.param(n, marks=[pytest.mark.full] * (n > 33_000)) for n in SIZES]
)
def test_the_same_tokens_with_and_without_kernels(kernels, dtype, vocab_size):
    for seed in range(6):
        logits, params = logits_of(13, vocab_size, dtype, seed), params_of(13, seed)
        assert torch.equal(draw(logits, params, kernels), draw(logits, params))


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws_without_a_softmax_are_those_with_it(kernels, dtype):
    """Steep rows, drawn by top_p alone or without a rule; most of them are sure. Uniform numbers on
    both sides of a border are never sure on the wrong side."""
    rows = 120
    logits = logits_of(rows, 33_000, dtype)
    params = params_of(rows, 3)
    off = np.zeros(rows)
    params = replace(params, top_k=off.astype(np.int64), min_p=off)
    borders = logits.float().div(torch.from_numpy(params.temperature)[:, None]).double()
    borders = borders.softmax(1).cumsum(1)[:, 16_000].numpy()
    near = borders * (1 + np.linspace(-1e-6, 1e-6, rows))
    for uniforms in (params.uniforms, near.clip(0, 1 - 2.0**-53)):
        own = replace(params, uniforms=uniforms)
        expected = draw(logits, own)
        assert torch.equal(draw(logits, own, kernels), expected)
        sure = draw_surely(logits, own, 64, kernels)
        assert torch.equal(sure.tokens[sure.is_sure], expected[sure.is_sure])
    assert draw_surely(logits, params, 64, kernels).is_sure.sum() > rows / 2


def test_tokens_that_top_p_may_keep_do_not_move_a_sure_draw(kernels):
    """Rows have 60 visible tokens; the rounding of the softmax decides which of the last are kept.
    Each moves the borders of the others, to which the uniform numbers are close."""
    rows, top_p = 40, 0.995
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(151_936, generator=generator)[:60] for _ in range(rows)])
    z = 0.02 * torch.randn(rows, 60, generator=generator) - 0.1 * torch.arange(60)
    z = z.sort(descending=True).values
    logits = torch.full((rows, 151_936), -30.0).scatter_(1, ids, z)
    shares = z.double().softmax(1)
    shares *= shares.cumsum(1) - shares < top_p
    borders = (shares / shares.sum(1, keepdim=True)).gather(1, ids.argsort(1)).cumsum(1)
    num_sure = 0
    for column in range(5, 60, 10):
        uniforms = borders[:, column].numpy() + np.linspace(-1e-3, 1e-3, rows)
        off, on = np.zeros(rows), np.ones(rows)
        params = DrawParams(
            temperature=on.astype(np.float32),
            top_k=off.astype(np.int64),
            top_p=on * top_p,
            min_p=off,
            uniforms=uniforms.clip(0, 1 - 2.0**-53),
        )
        sure = draw_surely(logits, params, 64, kernels)
        expected = draw(logits, params)
        assert torch.equal(sure.tokens[sure.is_sure], expected[sure.is_sure])
        num_sure += sure.is_sure.sum()
    assert 0 < num_sure < 6 * rows  # the others compute the softmax


@pytest.mark.parametrize("dtype", DTYPES)
def test_weigh(kernels, dtype):
    logits = logits_of(6, 1001, dtype)
    logits[5, 4] = torch.nan
    temperature = torch.linspace(0.1, 3, 6)
    uniforms = torch.full((6,), 0.4, dtype=torch.float64)
    sums, tokens = kernels.weigh(logits, temperature, uniforms)
    expected = kernels.temper(logits, temperature).double().exp().sum(1)
    torch.testing.assert_close(sums[:5], expected[:5], rtol=1e-6, atol=0)
    assert tokens[5] == -1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, *SIZES])
def test_first_argmax(kernels, dtype, vocab_size):
    """Ties, both zeros, infinities and NaN of both signs, at both edges of a row."""
    logits = torch.randn(9, vocab_size).round().to(dtype)
    logits[1] = -torch.inf
    logits[2] = torch.tensor([-0.0, 0.0]).repeat(vocab_size)[:vocab_size]
    for row, index, value in ((3, 0, torch.inf), (4, -1, torch.inf), (5, -1, torch.nan)):
        logits[row, index] = value
    logits[6, vocab_size // 2 :] = -torch.tensor(torch.nan)
    logits[7, 0] = logits[7, vocab_size // 3] = torch.nan
    ids, peaks = first_argmax(logits, kernels)
    assert torch.equal(ids, logits.argmax(dim=1))
    expected = logits.gather(1, ids[:, None])[:, 0]
    assert torch.equal(peaks.nan_to_num(7), expected.nan_to_num(7))
    assert peaks.isnan().tolist() == [row in (5, 6, 7) for row in range(9)]
    wide = torch.randn(3, vocab_size + 40).to(dtype)[:, 9 : vocab_size + 9]
    assert torch.equal(first_argmax(wide, kernels)[0], wide.argmax(dim=1))


def test_logits_that_the_kernels_do_not_take(kernels):
    logits, params = logits_of(9, 500), params_of(9, 1)
    strided = logits.T.contiguous().T
    assert torch.equal(draw(strided, params, kernels), draw(logits, params))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("num", [1, 64, 65])
def test_largest(kernels, dtype, vocab_size, num):
    wide = logits_of(5, vocab_size + 3, dtype)[:, :vocab_size]
    values, ids = kernels.largest(wide, num)
    assert torch.equal(values, wide.float().topk(num, dim=1).values)
    assert torch.equal(wide.float().gather(1, ids), values)
    assert all(len(set(row)) == num for row in ids.tolist())


def test_nan_and_infinity_are_the_largest(kernels):
    logits = torch.zeros(1, 1000)
    logits[0, 7], logits[0, 900] = torch.inf, torch.nan
    values, ids = kernels.largest(logits, 3)
    assert ids[0, :2].tolist() == [900, 7]
    assert values[0, 2] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_temper(kernels, dtype):
    logits = logits_of(6, 1001, dtype)
    temperature = torch.linspace(0.01, 3, 6)
    expected = (logits.float() - logits.float().amax(1, keepdim=True)) / temperature[:, None]
    assert torch.equal(kernels.temper(logits, temperature), expected)


def test_a_token_without_mass_is_never_drawn(kernels):
    probs = torch.zeros(3, 5000)
    probs[:, 2100], probs[:, 4000] = 0.5, 0.5
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    assert kernels.invert(probs, uniforms).tolist() == [2100, 4000, 4000]


def test_every_other_level(kernels_of_level):
    """Runs the sampler once with each instruction set but the best one."""
    test_the_same_tokens_with_and_without_kernels(kernels_of_level, torch.bfloat16, 33_000)
    test_largest(kernels_of_level, torch.bfloat16, 33_000, 65)
    test_temper(kernels_of_level, torch.float32)
    test_draws_without_a_softmax_are_those_with_it(kernels_of_level, torch.bfloat16)
