"""The sampling kernels return exactly the values and tokens of plain torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.draw import DrawParams, draw, masses
from mmdeploy_llm.engine.runner.sampling.largest import first_argmax

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


@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "vocab_size", [pytest.param(n, marks=[pytest.mark.full] * (n > 33_000)) for n in SIZES]
)
def test_the_same_tokens_with_and_without_kernels(kernels, dtype, vocab_size):
    for seed in range(6):
        logits, params = logits_of(13, vocab_size, dtype, seed), params_of(13, seed)
        assert torch.equal(draw(logits, params, kernels), draw(logits, params))


def rows_of(kind, vocab_size):
    """Returns 5 rows of logits."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator)
    if kind == "spread":
        return logits * torch.tensor([0.01, 1, 2, 3, 5])[:, None]
    if kind == "peaked":
        logits[:, ::17_000] += torch.tensor([6.0, 9, 12, 15, 40])[:, None]
    if kind == "equal":  # some thousand values in all, and many at every border
        return logits.mul(3).round().bfloat16().float()
    if kind == "banned":
        logits[torch.rand(5, vocab_size, generator=generator) < 0.999] = -torch.inf
    if kind == "uneven":  # a sample says nothing about the rest
        logits[:, 33:] -= 20
    return logits


@pytest.mark.few_in_ci(8)
@pytest.mark.one_is_quick
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["spread", "peaked", "equal", "banned", "uneven", "flat"])
@pytest.mark.parametrize("vocab_size", [40_000, pytest.param(250_002, marks=pytest.mark.full)])
def test_top_p_alone(kernels, dtype, kind, vocab_size):
    """Its border is found without a sort wherever it is, and is the same token's."""
    logits = rows_of(kind, vocab_size).to(dtype)
    off = np.zeros(5)
    for temperature in (0.5, 1.0, 100.0):
        for top_p in (0.0, 1e-9, 0.3, 0.7, 0.999, 1 - 2.0**-53, 1.0):
            params = DrawParams(
                temperature=np.full(5, temperature, dtype=np.float32),
                top_k=off.astype(np.int64),
                top_p=off + top_p,
                min_p=off,
                uniforms=np.array([0.0, 0.2, 0.6, 0.9, 1 - 2.0**-53]),
            )
            assert torch.equal(draw(logits, params, kernels), draw(logits, params))


def test_top_k_that_reaches_banned_tokens(kernels):
    logits = rows_of("banned", 40_000)
    for top_k in (50, 2_000, 40_000):
        params = replace(params_of(5, top_k), top_k=np.full(5, top_k), top_p=np.full(5, 0.9))
        assert torch.equal(draw(logits, params, kernels), draw(logits, params))


@pytest.mark.full
def test_every_uniform_number_of_a_border(kernels):
    """Tokens change at the same numbers, to the last bit."""
    logits = rows_of("flat", 40_000)[:1]
    weights = masses(logits - logits.max())[0]
    for top_p in (1.0, 0.9):
        total = weights.sum() if top_p == 1 else None
        if total is None:
            order = (logits[0] - logits.max()).sort(descending=True, stable=True).indices
            goal = int(np.ceil(top_p * float(weights.sum())))
            kept = order[: int((weights[order].cumsum(0) < goal).sum()) + 1]
            weights = torch.zeros_like(weights).index_copy(0, kept, weights[kept])
            total = weights.sum()
        border = float(weights[:20_000].sum()) / float(total)
        uniforms = border + np.arange(-40, 40) * 2.0**-52
        rows = np.ones(80)
        params = DrawParams(
            temperature=rows.astype(np.float32),
            top_k=np.zeros(80, dtype=np.int64),
            top_p=rows * top_p,
            min_p=0 * rows,
            uniforms=uniforms,
        )
        tokens = draw(logits.expand(80, -1).contiguous(), params, kernels)
        assert torch.equal(tokens, draw(logits.expand(80, -1), params))
        assert tokens.min() < 20_000 <= tokens.max()


def test_masses_are_those_of_the_exponential():
    z = -torch.linspace(0, 40, 100_001).square() / 40
    found, expected = masses(z).double(), z.double().exp() * 2.0**42
    assert ((found - expected).abs() <= expected * 2.0**-21 + 1).all()
    assert masses(torch.tensor([0.0, -torch.inf, torch.nan])).tolist() == [2**42, 0, 0]


@pytest.mark.one_is_quick
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


def test_a_token_without_mass_is_never_drawn(kernels):
    logits = torch.full((3, 5000), -50.0)
    logits[:, 2100], logits[:, 4000] = 0.0, 0.0
    params = replace(params_of(3, 0), uniforms=np.array([0.0, 0.5, 1 - 2.0**-53]))
    off = np.zeros(3)
    params = replace(params, top_k=off.astype(np.int64), top_p=off + 1, min_p=off)
    assert draw(logits, params, kernels).tolist() == [2100, 4000, 4000]


def test_rows_that_fail_draw_some_token(kernels):
    logits = rows_of("flat", 33_000)
    logits[0, 7], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 9_000:] = torch.nan
    for seed in range(6):
        tokens = draw(logits, params_of(5, seed), kernels)
        assert ((tokens >= 0) & (tokens < 33_000)).all()


def test_every_other_level(kernels_of_level):
    """Runs the sampler once with each instruction set but the best one."""
    test_the_same_tokens_with_and_without_kernels(kernels_of_level, torch.bfloat16, 33_000)
    for kind in ("spread", "peaked", "equal"):
        test_top_p_alone(kernels_of_level, torch.bfloat16, kind, 40_000)
    test_every_uniform_number_of_a_border(kernels_of_level)
