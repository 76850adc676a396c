"""The pooler: vectors of prompts in whole and in chunks, in passes that are computed again, and
what it refuses."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.layers.pooling.pooler import Pooler, PromptRows
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules
from mmdeploy_llm.values.plan import RequestFailure
from mmdeploy_llm.values.pooling_request import PoolingRequest

SIZE = 4
STATES = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(0))


class Model:
    hidden_size = SIZE

    def score(self, pooled):
        return pooled.sum(1, keepdim=True)

    def logits(self, hidden):
        return torch.cat([hidden, -hidden], 1)


def wanted(pooling="last", what="vector", **more):
    return PoolingRequest(what=what, pooling=pooling, **{"normalize": False, **more})


def rows(want, start, count, first=0, name="a", size=9, ids=()):
    return PromptRows(
        request_id=name,
        wanted=want,
        start=start,
        first=first,
        end=first + count,
        is_last=start + count == size,
        token_ids=ids,
    )


def in_chunks(want, *ends, ids=(), model=None):
    """The vector of STATES, computed in chunks that end there."""
    pooler, found, start = Pooler(model or Model()), {}, 0
    for end in ends:
        own = rows(want, start, end - start, ids=ids)
        found = pooler.add([own], STATES[start:end])
        start = end
    return found["a"]


EXPECTED = {
    "last": STATES[-1].numpy(),
    "cls": STATES[0].numpy(),
    "mean": STATES.mean(0).numpy(),
}


@pytest.mark.parametrize("pooling", EXPECTED)
@pytest.mark.parametrize("ends", [(9,), (1, 9), (8, 9), (3, 5, 9), range(1, 10)])
def test_a_vector_does_not_depend_on_chunks(pooling, ends):
    np.testing.assert_allclose(in_chunks(wanted(pooling), *ends), EXPECTED[pooling], atol=1e-6)


@pytest.mark.parametrize("ends", [(9,), (4, 9), range(1, 10)])
def test_vectors_of_tokens_and_skipped_tokens(ends):
    every = in_chunks(wanted(what="token_vectors"), *ends)
    np.testing.assert_allclose(every, STATES.numpy())
    rest = in_chunks(wanted(what="token_vectors", num_skipped=5), *ends)
    np.testing.assert_allclose(rest, STATES[5:].numpy())
    mean = in_chunks(wanted("mean", num_skipped=5), *ends)
    np.testing.assert_allclose(mean, STATES[5:].mean(0).numpy(), atol=1e-6)


@pytest.mark.parametrize("ends", [(9,), (5, 9), (7, 9), range(1, 10)])
def test_the_likelihood_of_the_tokens_after_the_prompt(ends):
    ids = (0, 1, 2, 3, 4, 5, 6, 7, 0)
    total, count = in_chunks(wanted(what="likelihood", num_skipped=6), *ends, ids=ids)
    logits = Model().logits(STATES).log_softmax(1)
    assert count == 3
    expected = logits[5, 6] + logits[6, 7] + logits[7, 0]
    assert total == pytest.approx(expected.item(), abs=1e-5)


def test_a_pass_that_is_computed_again_counts_once():
    pooler, want = Pooler(Model()), wanted("mean")
    pooler.add([rows(want, 0, 4)], STATES[:4])
    pooler.add([rows(want, 4, 5)], STATES[4:])  # its results were lost
    pooler.add([rows(want, 4, 2)], STATES[4:6])
    found = pooler.add([rows(want, 6, 3)], STATES[6:])
    np.testing.assert_allclose(found["a"], EXPECTED["mean"], atol=1e-6)


def test_a_request_that_starts_over_counts_from_its_start():
    pooler, want = Pooler(Model()), wanted("mean")
    pooler.add([rows(want, 0, 4)], STATES[:4] + 100)
    pooler.drop("a")
    np.testing.assert_allclose(
        pooler.add([rows(want, 0, 9)], STATES)["a"], EXPECTED["mean"], atol=1e-6
    )
    pooler.drop("nobody")


def test_a_step_of_different_requests():
    wants = [wanted("mean"), wanted("last"), wanted("cls"), wanted(what="score")]
    wants += [wanted(what="token_vectors", normalize=True)]
    step = torch.cat([STATES] * len(wants))
    found = Pooler(Model()).add(
        [rows(want, 0, 9, first=9 * i, name=str(i)) for i, want in enumerate(wants)], step
    )
    for name, pooling in enumerate(("mean", "last", "cls")):
        np.testing.assert_allclose(found[str(name)], EXPECTED[pooling], atol=1e-6)
    np.testing.assert_allclose(found["3"], [STATES[-1].sum()], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found["4"], axis=1), 1, atol=1e-6)


def test_a_vector_is_cut_before_it_is_normalised():
    found = in_chunks(wanted(dimensions=2, normalize=True), 9)
    np.testing.assert_allclose(found, STATES[-1, :2] / STATES[-1, :2].norm(), atol=1e-6)


def test_a_zero_vector_stays_zero():
    found = Pooler(Model()).add([rows(wanted(normalize=True), 0, 9)], torch.zeros(9, SIZE))
    assert found["a"].tolist() == [0] * SIZE


def test_a_vector_that_is_not_finite_is_one_error():
    states = torch.cat([STATES, STATES])
    states[8] = torch.inf
    both = [rows(wanted(), 0, 9, name="a"), rows(wanted(), 0, 9, first=9, name="b")]
    found = Pooler(Model()).add(both, states)
    assert isinstance(found["a"], RequestFailure)
    assert found["a"].code == 500
    assert "not finite" in found["a"].message
    np.testing.assert_allclose(found["b"], EXPECTED["last"])


def test_too_many_dimensions_and_no_tokens_are_errors():
    assert "have 4" in in_chunks(wanted(dimensions=5), 9).message
    assert "no tokens" in in_chunks(wanted(what="token_vectors", num_skipped=9), 9).message


def test_the_score_of_two_tokens():
    found = Pooler(Model(), rules=EmbeddingRules(score_tokens=(5, 2))).add(
        [rows(wanted(what="score"), 0, 9)], STATES
    )
    np.testing.assert_allclose(found["a"], [-STATES[-1, 1] - STATES[-1, 2]], atol=1e-6)


def test_an_embedding_of_another_form_is_the_plugins_fault():
    model = Model()
    model.embedding = lambda pooled: pooled[0]
    with pytest.raises(PluginContractError, match="embedding of acme returned"):
        Pooler(model, "acme").add([rows(wanted(), 0, 9)], STATES)


def test_half_precision_is_summed_in_float32():
    ones = torch.full((4096, SIZE), 1.001, dtype=torch.bfloat16)
    found = Pooler(Model()).add([rows(wanted("mean"), 0, 4096, size=4096)], ones)
    np.testing.assert_allclose(found["a"], ones[0].float().numpy())


@pytest.mark.parametrize("what", ["vector", "token_vectors", "score", "likelihood"])
def test_the_model_is_told_which_rows_of_the_step_it_computes(what):
    told = []

    @contextmanager
    def of_rows(found):
        told.append(found.tolist())
        yield
        told.append("left")

    pooler = Pooler(Model(), of_rows=of_rows)
    want = wanted(what=what, num_skipped=2 if what == "likelihood" else 0)
    others = rows(wanted(), 0, 3, name="b", size=9)
    pooler.add([others, rows(want, 0, 4, first=3, size=4, ids=(0, 1, 2, 3))], STATES)
    expected = {"token_vectors": [3, 4, 5, 6], "likelihood": [4, 5]}.get(what, [6])
    assert told == [expected, "left"]


def test_the_logits_of_long_labels_are_computed_in_parts():
    counts = []

    class Counting(Model):
        def logits(self, hidden):
            counts.append(len(hidden))
            return super().logits(hidden)

    states = torch.randn(601, SIZE, generator=torch.Generator().manual_seed(0))
    ids = [row % (2 * SIZE) for row in range(601)]
    own = rows(wanted(what="likelihood", num_skipped=1), 0, 601, size=601, ids=ids)
    found = Pooler(Counting()).add([own], states)["a"]
    expected = Model().logits(states[:-1]).log_softmax(1)[range(600), ids[1:]].sum()
    assert found.tolist() == pytest.approx([float(expected), 600], rel=1e-5)
    assert counts == [256, 256, 88]


def test_an_instruction_without_a_text_has_no_mean():
    """All tokens are skipped: a vector of zeros would be as near to all as to none."""
    for want in (wanted("mean", num_skipped=9), wanted(what="token_vectors", num_skipped=9)):
        found = Pooler(Model()).add([rows(want, 0, 9)], STATES)["a"]
        assert found.code == 400
        assert "no tokens besides its instruction" in found.message
