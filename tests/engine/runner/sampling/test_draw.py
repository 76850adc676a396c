"""Random draws: kept tokens against transformers' warpers, draws against a readable reference,
frequencies against probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmdeploy_llm.engine.runner.sampling.draw import DrawParams, draw

pytestmark = pytest.mark.usefixtures("one_thread")

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
VOCAB_SIZES = (2, 30, 64, 65, 500, 3000, 10_000)

rules = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.05, 0.5, 0.8, 1.0, 1.7, 20.0]),
        "top_k": st.sampled_from([0, 0, 2, 5, 50, 63, 64, 200, 1023]),
        "top_p": st.sampled_from([1.0, 1.0, 0.01, 0.3, 0.7, 0.95, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.9, 1.0]),
    }
)


def params(rows):
    """Returns DrawParams with one dict per row; top_k is limited to the vocabulary."""

    def column(name, dtype):
        return np.array([row[name] for row in rows], dtype=dtype)

    return DrawParams(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int64),
        top_p=column("top_p", np.float64),
        min_p=column("min_p", np.float64),
        uniforms=column("uniform", np.float64),
    )


def logits_of(num_rows, vocab_size, seed, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread


def small_k(rule, vocab_size):
    return {**rule, "top_k": rule["top_k"] if rule["top_k"] < vocab_size else 0}


def kept_tokens(logits, *, temperature, top_k, top_p, min_p):
    """Returns [V] bool: the tokens that may be drawn from one row of logits [V], found with full
    sorts."""
    z = (logits.float() - logits.float().max()) / temperature
    kept = z > -torch.inf
    if min_p > 0:
        kept &= z >= math.log(min_p)
    if 0 < top_k < len(z):
        kept &= z >= z.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        probs = probabilities(z, kept)
        order = probs.sort(descending=True).indices
        before = probs[order].cumsum(0) - probs[order]
        count = int((before < top_p).sum())
        kept &= z >= z[order[max(count - 1, 0)]]
    return kept


def probabilities(z, kept):
    """Returns [V] float64: the softmax of z over the kept tokens, zero elsewhere."""
    return z.double().masked_fill(~kept, -torch.inf).softmax(0)


def draw_one(logits, *, temperature, top_k, top_p, min_p, uniform):
    """Returns the first token at which the running sum of probabilities, in vocabulary order,
    exceeds `uniform`."""
    kept = kept_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = probabilities((logits.float() - logits.float().max()) / temperature, kept)
    return int((probs.cumsum(0) <= uniform).sum().clamp(max=len(logits) - 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(rules, st.sampled_from(VOCAB_SIZES), st.integers(0, 2**31))
def test_the_reference_keeps_what_transformers_keeps(rule, vocab_size, seed):
    logits = logits_of(1, vocab_size, seed)
    scores = TemperatureLogitsWarper(rule["temperature"])(None, logits)
    if rule["min_p"]:
        scores = MinPLogitsWarper(rule["min_p"])(None, scores)
    if rule["top_k"]:
        scores = TopKLogitsWarper(rule["top_k"])(None, scores)
    if rule["top_p"] < 1:
        scores = TopPLogitsWarper(rule["top_p"])(None, scores)
    kept = kept_tokens(logits[0], **rule)
    assert torch.equal(kept, scores[0] > -torch.inf)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(rules, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=6),
    st.sampled_from(VOCAB_SIZES),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    st.booleans(),
)
def test_draws_equal_the_reference(rows, vocab_size, seed, spread, has_ties):
    logits = logits_of(len(rows), vocab_size, seed, spread)
    if has_ties:
        logits = logits.round()
    rows = [{**small_k(rule, vocab_size), "uniform": uniform} for rule, uniform in rows]
    tokens = draw(logits, params(rows)).tolist()
    for token, row, rule in zip(tokens, logits, rows, strict=True):
        uniform = rule.pop("uniform")
        kept = kept_tokens(row, **rule)
        probs = probabilities((row - row.max()) / rule["temperature"], kept)
        assert kept[token]
        assert probs[token] > 0
        # Float32 probabilities on one side, float64 on the other: the borders differ a little.
        below = float(probs[:token].sum())
        assert below - 1e-5 <= uniform <= below + float(probs[token]) + 1e-5
        if min(uniform - below, below + float(probs[token]) - uniform) > 1e-5:
            assert token == draw_one(row, **rule, uniform=uniform)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("vocab_size", "rule"),
    [
        (20, {}),
        (20, {"temperature": 2.0, "top_k": 7}),
        (20, {"top_p": 0.8}),
        (300, {"top_p": 0.7}),
        (300, {"top_k": 12, "top_p": 0.9, "min_p": 0.02}),
        (300, {"min_p": 0.1, "temperature": 0.7}),
        (300, {"temperature": 5.0, "top_p": 0.9}),
    ],
)
def test_frequencies_are_the_probabilities(vocab_size, rule):
    rule = {**OFF, **rule}
    num_draws = 4000
    row = logits_of(1, vocab_size, 5, 1.5)
    uniforms = np.random.default_rng(0).random(num_draws)
    rows = params([{**rule, "uniform": uniform} for uniform in uniforms])
    tokens = draw(row.expand(num_draws, -1).contiguous(), rows)
    kept = kept_tokens(row[0], **rule)
    probs = probabilities((row[0] - row.max()) / rule["temperature"], kept).numpy()
    counts = np.bincount(tokens.numpy(), minlength=vocab_size)
    assert (counts[~kept.numpy()] == 0).all()
    expected = probs * num_draws
    is_common = expected > 5
    chi_square = ((counts - expected) ** 2 / np.where(is_common, expected, 1))[is_common].sum()
    free = int(is_common.sum()) - 1
    assert chi_square < free + 5 * np.sqrt(2 * free)


@pytest.mark.parametrize("vocab_size", [40, 2000])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2.0**-53])
def test_banned_tokens_are_never_drawn(vocab_size, uniform):
    logits = torch.full((1, vocab_size), -torch.inf)
    logits[0, vocab_size // 2] = 0.0
    for rule in (OFF, {**OFF, "top_k": 5}, {**OFF, "top_p": 0.9}, {**OFF, "min_p": 0.1}):
        assert draw(logits, params([{**rule, "uniform": uniform}])).tolist() == [vocab_size // 2]


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_extreme_temperatures_are_finite(temperature):
    logits = torch.tensor([[1.0, 3.0, -torch.inf, 2.0] * 50])
    tokens = [
        int(draw(logits, params([{**OFF, "temperature": temperature, "uniform": u}]))[0])
        for u in (0.01, 0.3, 0.6, 0.99)
    ]
    values = logits[0, tokens].tolist()
    if temperature < 1:
        assert values == [3.0] * 4
    else:
        assert tokens == [1, 60, 120, 197]  # all but the banned ones are alike
    assert -torch.inf not in values


def test_nan_rows_do_not_affect_others():
    logits = logits_of(3, 1000, 0)
    rows = [{**OFF, "top_p": 0.9, "uniform": 0.4}] * 3
    clean = draw(logits, params(rows)).tolist()
    logits[1, 17] = torch.nan
    mixed = draw(logits, params(rows)).tolist()
    assert (mixed[0], mixed[2]) == (clean[0], clean[2])
    assert 0 <= mixed[1] < 1000
