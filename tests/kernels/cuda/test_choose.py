"""Sampling on the device, compared with engine/runner/sampling/draw.py, in tiles so small that rows
have several."""

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.draw import (
    DrawParams,
    draw,
    first_states,
    min_p_cutoff,
    uniforms,
)


@pytest.fixture(scope="module")
def choose(triton_device):
    from mmdeploy_llm.kernels.cuda import choose

    return choose


@pytest.fixture(scope="module")
def tilings(choose):
    """Few candidates, so that cut-offs lie below them, and many."""
    few = choose.Tiling(block=64, candidates=8, together=128)
    return few, choose.Tiling(block=128, candidates=64, together=512)


def random_params(rng, num_rows, vocab_size):
    top_k = rng.choice([0, 0, 1, 3, 40, 70], num_rows)
    return {
        "temperature": rng.choice([0.3, 1.0, 2.0], num_rows).astype(np.float32),
        "top_k": np.where(top_k < vocab_size, top_k, 0),
        "top_p": rng.choice([0.0, 0.2, 0.7, 0.99, 1.0, 1.0], num_rows),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.5, 1.0], num_rows),
    }


class Rows:
    """Rows of parameters, as draw() and as the kernels accept them."""

    def __init__(self, choose, params, device, seed=0):
        from mmdeploy_llm.kernels.cuda import choose_kernels as columns

        rng = np.random.default_rng(seed)
        num_rows = len(params["top_k"])
        seeds = rng.integers(0, 2**60, num_rows).astype(np.uint64)
        positions = rng.integers(0, 9, num_rows)
        drawn = uniforms(seeds, positions.astype(np.uint64))
        self.params = DrawParams(**params, uniforms=drawn)
        ints = np.zeros((num_rows, 8), dtype=np.int64)
        reals = np.zeros((num_rows, 8))
        ints[:, columns.SEED] = first_states(seeds).view(np.int64)
        ints[:, columns.NUM_OUTPUTS] = positions
        ints[:, columns.TOP_K] = params["top_k"]
        ints[:, columns.IS_RANDOM] = 1
        reals[:, columns.TEMPERATURE] = params["temperature"]
        reals[:, columns.LEAST] = min_p_cutoff(self.params)
        reals[:, columns.TOP_P] = params["top_p"]
        self._tables = torch.from_numpy(ints), torch.from_numpy(reals)
        self._choose, self._device = choose, device

    def choose(self, logits, tiling, rows=slice(None)):
        """Returns the token ids of some rows; the tables stay unchanged."""
        ints, reals = (table.to(self._device, copy=True) for table in self._tables)
        rules = self._choose.Rules(
            ints=ints,
            reals=reals,
            edit_ids=torch.zeros(len(ints), 1, dtype=torch.int32, device=self._device),
            edit_values=torch.zeros(len(ints), 1, device=self._device),
            counts=torch.zeros(1, dtype=torch.int16, device=self._device),
        )
        slots = torch.arange(len(ints), device=self._device)[rows]
        logits = logits[rows].to(self._device)
        found, outcomes = self._choose.choose(logits, slots, rules, tiling=tiling).cpu()
        assert outcomes.eq(self._choose.OK).all()
        return found


@pytest.mark.few_in_ci(3)
@pytest.mark.parametrize(
    "vocab_size", [65, *(pytest.param(size, marks=pytest.mark.full) for size in (50, 64, 500))]
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)]
)
def test_draws_equal_those_of_the_host(choose, tilings, triton_device, vocab_size, dtype):
    """The parameters are random; equal logits are frequent in 16 bits."""
    rng = np.random.default_rng(vocab_size + dtype.itemsize)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(6, vocab_size, generator=generator) * 3).to(dtype)
    rows = Rows(choose, random_params(rng, 6, vocab_size), triton_device)
    expected = draw(logits, rows.params)
    for tiling in tilings:
        assert rows.choose(logits, tiling).tolist() == expected.tolist()


@pytest.mark.full
def test_alone_and_in_a_batch(choose, tilings, triton_device):
    rng = np.random.default_rng(1)
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1)) * 2
    rows = Rows(choose, random_params(rng, 6, 300), triton_device)
    together = rows.choose(logits, tilings[0]).tolist()
    alone = [rows.choose(logits, tilings[0], [row]).tolist()[0] for row in range(6)]
    assert alone == together


@pytest.mark.full
@pytest.mark.parametrize(
    "rule", [{"top_k": 5}, {"top_p": 0.4}, {"min_p": 0.9}, {"top_k": 5, "top_p": 0.4}, {}]
)
def test_equal_logits(choose, tilings, triton_device, rule):
    """Equal logits are kept or dropped together; here all are kept, so every token can be drawn."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    count = 16
    types = {"temperature": np.float32, "top_k": np.int64}
    params = {
        name: np.full(count, value, dtype=types.get(name, np.float64))
        for name, value in {**off, **rule}.items()
    }
    logits = torch.full((count, 150), 3.0)
    rows = Rows(choose, params, triton_device)
    found = rows.choose(logits, tilings[0])
    assert found.tolist() == draw(logits, rows.params).tolist()
    assert len(set(found.tolist())) > 10


@pytest.mark.full
def test_frequencies(choose, tilings, triton_device):
    """In 120 draws the count of each token is within four deviations of its probability."""
    probs = torch.tensor([0.5, 0.2, 0.2, 0.1])
    count = 120
    params = {
        "temperature": np.ones(count, dtype=np.float32),
        "top_k": np.zeros(count, dtype=np.int64),
        "top_p": np.ones(count),
        "min_p": np.zeros(count),
    }
    logits = torch.full((count, 130), -torch.inf)
    logits[:, [3, 70, 71, 129]] = probs.log()
    found = Rows(choose, params, triton_device).choose(logits, tilings[1])
    counts = found.bincount(minlength=130)[[3, 70, 71, 129]]
    assert counts.sum() == count
    deviations = (counts - count * probs) / (count * probs * (1 - probs)).sqrt()
    assert deviations.abs().max() < 4
