"""Vectors, scores and labels as callers of LLM see them, compared with transformers."""

import asyncio

import numpy as np
import pytest
import torch

from mmdeploy_llm import ConfigError, SamplingParams
from mmdeploy_llm.client.embedding import Scoring, ranked
from mmdeploy_llm.layers.pooling.abilities import Abilities
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules
from mmdeploy_llm.values.outputs.pooled import PooledOutput, ScoreOutput
from mmdeploy_llm.values.outputs.request_output import RequestMetrics, RequestOutput
from tests.together import begin_together

PROMPTS = ["The quick brown fox jumps over the lazy dog. " * 6, "the cat", "hello there " * 40]
LABELS = ["cat", " dog barks a lot", "x"]
OPTIONS = {"dtype": "float32", "use_warmup": False, "quiet": True}


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return str(tiny_folder("llama"))


@pytest.fixture(scope="module")
def llm(folder):
    """Prompts take several chunks, in a pool that holds a few of them."""
    from mmdeploy_llm import LLM

    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 16}
    with LLM(folder, **OPTIONS, **limits, num_gpu_blocks_override=40, max_model_len=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def states(folder):
    """states(ids) -> transformers' last hidden states, and its logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def of(ids):
        with torch.no_grad():
            hidden = model.model(torch.tensor([list(ids)])).last_hidden_state[0]
            return hidden, model.lm_head(hidden)

    return of


def pooled(hidden, pooling):
    found = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0), "tokens": hidden}
    return torch.nn.functional.normalize(found[pooling], dim=-1).numpy()


@pytest.mark.full
@pytest.mark.parametrize("pooling", ["last", "cls", "mean", "tokens"])
def test_vectors_are_transformers(llm, states, pooling):
    for _ in range(2):  # the second time with hits of the prefix cache, where they help
        for output in llm.embed(PROMPTS, use_tqdm=False, pooling=pooling):
            expected = pooled(states(output.prompt_token_ids)[0], pooling)
            np.testing.assert_allclose(output.embedding, expected, atol=2e-6)
            assert output.embedding.dtype == np.float32
            assert output.metrics.model_execute_time > 0
    assert (output.num_cached_tokens > 0) == (pooling == "last")


def test_vectors_beside_texts_and_preemption(llm, states, monkeypatch):
    """The newest request is preempted in every third step, whatever it wants."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = llm.generate(PROMPTS, params, use_tqdm=False)
    scheduler = llm._desk.engine._scheduler
    plan, requests = scheduler.plan, scheduler._requests

    def preempting(now):
        if scheduler._num_steps % 3 == 2 and len(requests.running) > 1:
            requests.preempt(requests.running[-1])
        return plan(now)

    monkeypatch.setattr(scheduler, "plan", preempting)
    outputs = []
    for pooling in ("mean", "tokens", "last"):
        asks = iter(llm.embed_iter(PROMPTS * 3, pooling=pooling))
        outputs.append((pooling, next(asks)))
        begin_together(llm, len(PROMPTS))
        texts = llm.generate(PROMPTS, params, use_tqdm=False)
        outputs += [(pooling, output) for output in asks]
        assert [own.outputs.token_ids for own in texts] == [own.outputs.token_ids for own in alone]
    assert llm._desk.engine.stats().num_preemptions > 10
    assert len(outputs) == 27
    for pooling, output in outputs:
        expected = pooled(states(output.prompt_token_ids)[0], pooling)
        np.testing.assert_allclose(output.embedding, expected, atol=2e-6)


def test_a_prompt_may_fill_the_whole_context(llm):
    ids = [5] * 513
    good, long = llm.embed([ids[:512], ids], use_tqdm=False)
    assert good.is_ok
    assert "513 tokens, 512 are allowed" in long.error_msg
    assert long.embedding is None


def test_dimensions_normalisation_and_wrong_prompts(llm):
    (whole,) = llm.embed("the cat", use_tqdm=False, normalize=False)
    (cut,) = llm.embed("the cat", use_tqdm=False, dimensions=8, normalize=True)
    expected = whole.embedding[:8] / np.linalg.norm(whole.embedding[:8])
    np.testing.assert_allclose(cut.embedding, expected, atol=1e-6)
    (first,) = llm.embed("the cat", use_tqdm=False, dimensions=8)  # as sentence-transformers
    expected = whole.embedding[:8] / np.linalg.norm(whole.embedding)
    np.testing.assert_allclose(first.embedding, expected, atol=1e-6)
    empty, fine, much, wrong = llm.embed(
        ["", "the cat", {"prompt": "a", "multimodal_data": {"image": "x.png"}}, [10**9]],
        use_tqdm=False,
    )
    assert fine.is_ok
    assert "empty" in empty.error_msg
    assert "image" in much.error_msg
    assert "token id" in wrong.error_msg
    assert "have 64" in llm.embed("a", use_tqdm=False, dimensions=65)[0].error_msg


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dimensions": 0}, ValueError),
        ({"dimensions": True}, ValueError),
        ({"normalize": "yes"}, TypeError),
        ({"instruction": 5}, TypeError),
        ({"pooling": "max"}, ValueError),
        ({"sampling_params": SamplingParams()}, TypeError),
    ],
)
def test_wrong_options_raise(llm, options, error):
    with pytest.raises(error):
        llm.embed("a", use_tqdm=False, **options)


def test_an_instruction_stands_before_the_prompt(llm):
    one, two = llm.embed(["the cat"], False, instruction="query: "), llm.embed("query: the cat")
    assert one[0].prompt_token_ids == two[0].prompt_token_ids


@pytest.mark.full
def test_labels_are_as_likely_as_transformers_says(llm, states):
    for by_length in (False, True):
        outputs = llm.classify(PROMPTS, LABELS, use_tqdm=False, normalize_length=by_length)
        assert [output.item for output in outputs] == PROMPTS
        for output in outputs:
            ids, sums = output.prompt_token_ids, []
            (first,) = (llm.get_tokenizer()(LABELS[0], add_special_tokens=False)["input_ids"],)
            prompt = ids[: -len(first)]
            for label in LABELS:
                own = llm.get_tokenizer()(label, add_special_tokens=False)["input_ids"]
                logits = states([*prompt, *own])[1].log_softmax(-1)
                rows = torch.arange(len(prompt) - 1, len(prompt) + len(own) - 1)
                total = logits[rows, torch.tensor(own)].sum().item()
                sums.append(total / len(own) if by_length else total)
            assert list(output.logprobs.values()) == pytest.approx(sums, abs=2e-4)
            shares = torch.tensor(sums).softmax(0).tolist()
            assert list(output.probabilities.values()) == pytest.approx(shares, abs=1e-3)
            assert output.label == LABELS[int(np.argmax(sums))]


def test_the_prompt_of_labels_is_computed_once(llm):
    before = llm.stats()
    begin_together(llm, 4)  # the pool has room for all
    llm.classify("one two three four five " * 8, ["a", "b", "c", "d"], use_tqdm=False)
    after = llm.stats()
    queried = after.num_queried_tokens - before.num_queried_tokens
    assert after.num_cached_tokens - before.num_cached_tokens > 0.6 * queried


@pytest.mark.parametrize("labels", ["ab", [], ["a"], ["a", "a"], ["a", ""], ["a", 5], None])
def test_labels_that_cannot_be_compared_raise(llm, labels):
    with pytest.raises((ValueError, TypeError), match="labels must be"):
        llm.classify("x", labels, use_tqdm=False)


def test_a_failed_prompt_of_classify_is_one_error(llm):
    bad, good = llm.classify(["", "the cat"], LABELS, use_tqdm=False)
    assert "empty" in bad.error_msg
    assert bad.label is None
    assert good.is_ok


def test_a_generating_model_ranks_nothing(llm):
    with pytest.raises(ConfigError, match="Load a reranker"):
        llm.rerank("a", ["b"])


def test_outputs_become_rows_and_json(llm):
    (output,) = llm.embed("the cat", use_tqdm=False)
    assert len(output.to_dict()["embedding"]) == 64
    assert '"embedding": [' in output.to_json()
    assert output.to_row()["num_input_tokens"] == len(output.prompt_token_ids)
    assert "64 float32" in repr(output)
    assert "error 400" in repr(llm.embed("", use_tqdm=False)[0])
    (label,) = llm.classify("the cat", LABELS, use_tqdm=False)
    assert label.label in repr(label)


def output_of(index, vector):
    """Returns what the engine gives for prompt `index`."""
    code, words = (200, None) if vector is not None else (400, "it is wrong")
    return PooledOutput(
        request_id=str(index),
        prompt=None,
        item=index,
        metrics=RequestMetrics(arrival_time=0.0),
        vector=None if vector is None else np.array(vector, dtype=np.float32),
        error_code=code,
        error_msg=words,
    )


EMBEDDER = Abilities(can_generate=False, pooling="last")


def scoring(**rules):
    abilities = Abilities(can_generate=False, pooling="last", rules=EmbeddingRules(**rules))
    return Scoring(abilities, "q", ["a", "b", "c"], None)


def test_scores_by_vectors_keep_the_order_of_the_documents():
    work = scoring(query_prompt="query")
    assert [ask.wanted.instruction for ask in work.asks] == ["query", None, None, None]
    vectors = [[1, 0], [0, 2], None, [3, 3]]
    scores = work.outputs([output_of(i, own) for i, own in enumerate(vectors)])
    assert [own.index for own in scores] == [0, 1, 2]
    assert [own.score for own in scores] == [0, None, pytest.approx(0.5**0.5)]
    assert scores[1].error_msg == "it is wrong"
    best = ranked(scores, 2)
    assert [own.index for own in best] == [2, 0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("dot", 4), ("euclidean", -(2**0.5)), ("manhattan", -2), ("cosine", 0.8)],
)
def test_similarities(kind, expected):
    work = scoring(similarity=kind)
    outputs = [output_of(0, [1, 2]), *[output_of(1, [2, 1])] * 3]
    assert work.outputs(outputs)[0].score == pytest.approx(expected)


def test_vectors_of_tokens_are_compared_token_by_token():
    query, document = [[1, 0], [0, 1]], [[0.5, 0], [0, 3], [1, 1]]
    found = scoring().outputs([output_of(0, query), *[output_of(1, document)] * 3])
    assert found[0].score == pytest.approx(1 + 3)


def test_a_query_that_failed_is_the_error_of_all():
    found = scoring().outputs([output_of(0, None), *[output_of(1, [1, 0])] * 3])
    assert [own.error_msg for own in found] == ["the query failed: it is wrong"] * 3
    assert ranked(found, None) == found


def test_scores_of_a_folder_that_names_no_reranker_are_warned_of_once(caplog):
    rules = EmbeddingRules(score_tokens=(8, 3), assumed_of="Some-Model-of-this-test")
    for _ in range(2):
        Scoring(Abilities(can_score=True, rules=rules), "p", ["a", "b"], None)
    (record,) = caplog.records
    assert record.message.startswith("'Some-Model-of-this-test' does not say that it is a reranker")
    Scoring(Abilities(can_score=True), "p", ["a"], None)
    assert len(caplog.records) == 1


def test_pairs_are_scored_together():
    abilities = Abilities(can_generate=False, can_score=True)
    work = Scoring(abilities, ["p", "q"], ["a", "b"], None)
    assert [ask.prompt for ask in work.asks] == [
        {"query": "p", "document": "a"},
        {"query": "q", "document": "b"},
    ]
    found = work.outputs([output_of("a", [0.5]), output_of("b", [1.5])])
    assert [own.score for own in found] == [0.5, 1.5]
    assert isinstance(found[0], ScoreOutput)


@pytest.mark.parametrize("top_n", [0, -1, True, 1.5])
def test_top_n_is_a_whole_number(top_n):
    with pytest.raises(ValueError, match="top_n"):
        ranked((), top_n)


def test_wrong_queries_and_documents_raise():
    for query, documents in (("q", "one text"), (["p", "q"], ["a"]), ("q", {"prompt": "a"})):
        with pytest.raises((TypeError, ValueError)):
            Scoring(EMBEDDER, query, documents, None)


def test_an_output_of_text_has_no_vector():
    output = RequestOutput(request_id="a", prompt="", metrics=RequestMetrics(arrival_time=0.0))
    assert "vector" not in output.to_dict()


@pytest.mark.full
def test_scores_belong_to_their_documents_whatever_finishes_first(folder, monkeypatch):
    """Answers come in another order than the documents, and some are errors."""
    from mmdeploy_llm import LLM
    from mmdeploy_llm.client import answering

    documents = [" ".join(["word"] * (1 + 37 * i % 50)) for i in range(20)]
    documents[7] = ""
    finished, answers = [], answering.Feed.answers

    def shuffled(feed):
        """All answers, the last ones first."""
        own = list(answers(feed))
        finished.extend(answer.ask.shown for answer in reversed(own))
        yield from reversed(own)

    with LLM(folder, **OPTIONS, max_num_seqs=3, max_num_batched_tokens=32) as llm:
        llm._desk.abilities = Abilities(pooling="mean")  # as if it were made for vectors
        query, *alone = [llm.embed(own, use_tqdm=False)[0] for own in ["a query", *documents]]
        monkeypatch.setattr(answering.Feed, "answers", shuffled)
        scores = llm.score("a query", documents, use_tqdm=False)
    assert finished[:20] != documents
    assert [own.item for own in scores] == documents
    assert [own.index for own in scores] == list(range(20))
    for score, own in zip(scores, alone, strict=True):
        if own.is_ok:
            assert score.score == pytest.approx(float(query.embedding @ own.embedding), abs=1e-5)
        else:
            assert score.score is None
            assert "empty" in score.error_msg
    assert [own.is_ok for own in scores].count(False) == 1


@pytest.mark.full
def test_async_and_a_pool_of_models(folder):
    """The same methods in tasks, beside each other and beside texts."""
    from mmdeploy_llm import ModelPool

    async def ask(model):
        async def text():
            return [output async for output in model.generate(PROMPTS[1])][-1]

        return await asyncio.gather(
            model.embed(PROMPTS, dimensions=8),
            model.classify(PROMPTS[:2], LABELS),
            model.score("the cat", ["the cat", "", "the dog"]),
            model.rerank("the cat", ["the dog", "the cat"], 1),
            text(),
        )

    with ModelPool() as pool:
        pool.install("one", folder, **OPTIONS, max_queued=1, max_num_seqs=2)
        model = pool.start("one")
        model._desk.abilities = Abilities(pooling="last")
        vectors, labels, scores, best, text = asyncio.run(ask(model))
        with pytest.raises(AttributeError, match="use embed"):
            model.encode(PROMPTS)
        with pytest.raises(ValueError, match="top_n"):
            asyncio.run(model.rerank("a", ["b"], 0))
    assert [own.embedding.shape for own in vectors] == [(8,)] * 3
    assert [own.item for own in vectors] == PROMPTS
    assert [sum(own.probabilities.values()) for own in labels] == pytest.approx([1, 1])
    assert [own.is_ok for own in scores] == [True, False, True]
    assert scores[0].score == pytest.approx(1, abs=1e-5)
    assert [own.index for own in best] == [1]
    assert text.is_ok


@pytest.mark.full
def test_engines_in_other_processes_give_the_same_vectors(folder, llm):
    from mmdeploy_llm import LLM

    alone = llm.embed(PROMPTS * 4, use_tqdm=False, pooling="mean")
    with LLM(folder, **OPTIONS, data_parallel_size=2, num_threads=1) as many:
        together = many.embed(PROMPTS * 4, use_tqdm=False, pooling="mean")
        labels = many.classify(PROMPTS, LABELS, use_tqdm=False)
        assert many._desk.abilities.can_generate
    for one, two in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.embedding, two.embedding, atol=1e-5)
    assert [own.label for own in labels] == [
        own.label for own in llm.classify(PROMPTS, LABELS, use_tqdm=False)
    ]


@pytest.mark.full
def test_ranks_give_the_same_vectors(folder, llm):
    from mmdeploy_llm import LLM

    with LLM(folder, **OPTIONS, tensor_parallel_size=2) as ranks:
        for pooling in ("mean", "tokens"):
            alone = llm.embed(PROMPTS, use_tqdm=False, pooling=pooling)
            together = ranks.embed(PROMPTS, use_tqdm=False, pooling=pooling)
            for one, two in zip(alone, together, strict=True):
                np.testing.assert_allclose(one.embedding, two.embedding, atol=1e-5)


def test_a_request_that_is_aborted_or_too_late_ends(llm):
    late, good = llm.embed([{"prompt": "the cat", "timeout": 1e-9}, "the cat"], use_tqdm=False)
    assert late.error_code == 408
    assert good.is_ok
    asks = iter(llm.embed_iter(PROMPTS * 9))
    next(asks)
    asks.close()
    assert llm.embed("the cat", use_tqdm=False)[0].is_ok


def test_other_names_say_what_to_call(llm):
    with pytest.raises(AttributeError, match="embed"):
        llm.encode("a")
    with pytest.raises(TypeError, match="embed_iter takes an iterable"):
        llm.embed_iter("a")
    with pytest.raises(TypeError, match="dimensions"):
        llm.embed("a", dimension=8)


@pytest.mark.parametrize("option", [{"runner": "pooling"}, {"task": "embed"}, {"task": "score"}])
def test_the_task_of_another_engine_means_nothing_here(option):
    from mmdeploy_llm import EngineConfig

    assert EngineConfig.from_options("m", option).model == "m"
    with pytest.raises(ConfigError, match="the call decides"):
        EngineConfig.from_options("m", {"task": "transcription"})
