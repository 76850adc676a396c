"""Encoders in the engine, compared with transformers: whole prompts, pairs with token types, ranks
of documents, and what such models cannot do."""

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.bert import tiny

from mmdeploy_llm import LLM, ConfigError
from mmdeploy_llm.testing.tiny import write_family

TEXTS = ["the quick brown fox jumps over the lazy dog", "a", "hello there " * 9]
OPTIONS = {"dtype": "float32", "quiet": True, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The engine and transformers' model."""
    from transformers import AutoModel

    folder = tmp_path_factory.mktemp("bert")
    write_family(tiny.BERT, folder)
    with LLM(folder, **OPTIONS) as llm:
        yield llm, AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    from transformers import AutoModelForSequenceClassification as Classifier

    folder = tmp_path_factory.mktemp("reranker")
    write_family(tiny.BERT_RERANKER, folder)
    with LLM(folder, **OPTIONS) as llm:
        yield llm, Classifier.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("pooling", ["cls", "mean", "tokens"])
def test_vectors_of_an_encoder(bert, pooling):
    llm, model = bert
    for output in llm.embed(TEXTS * 3, use_tqdm=False, pooling=pooling, normalize=False):
        with torch.no_grad():
            states = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        expected = {"cls": states[0], "mean": states.mean(0), "tokens": states}[pooling]
        np.testing.assert_allclose(output.embedding, expected.numpy(), atol=2e-6)
        assert output.num_cached_tokens == 0


def test_an_encoder_keeps_and_divides_nothing(bert):
    llm, _ = bert
    assert not llm.runtime.enable_prefix_caching
    assert not llm.runtime.enable_chunked_prefill
    assert "KV cache: none" in repr(llm)
    (fits,) = llm.embed([[5] * llm.runtime.max_model_len], use_tqdm=False)
    (long,) = llm.embed([[5] * (llm.runtime.max_model_len + 1)], use_tqdm=False)
    assert fits.is_ok
    assert long.error_code == 400


def test_an_encoder_generates_nothing(bert):
    llm, _ = bert
    (output,) = llm.generate("a", use_tqdm=False)
    assert output.error_msg.startswith("this model gives vectors, it cannot generate")
    (label,) = llm.classify("a", ["b", "c"], use_tqdm=False)
    assert "cannot generate" in label.error_msg


def test_documents_are_ranked_by_vectors(bert):
    llm, _ = bert
    query, *others = llm.embed(["a", *TEXTS], use_tqdm=False)
    expected = [float(own.embedding @ query.embedding) for own in others]
    scores = llm.score("a", TEXTS, use_tqdm=False)
    assert [own.score for own in scores] == pytest.approx(expected, abs=1e-5)
    assert [own.item for own in scores] == TEXTS
    (best,) = llm.rerank("a", TEXTS, 1, use_tqdm=False)
    assert (best.index, best.score) == (1, pytest.approx(1))


def test_pairs_have_token_types(reranker):
    llm, model = reranker
    texts = [*TEXTS, ""]
    scores = llm.score("the cat", texts, use_tqdm=False)
    for own in scores[:3]:
        pair = llm.get_tokenizer()("the cat", own.item, return_tensors="pt")
        if "token_type_ids" in pair:
            assert pair["token_type_ids"].max() == 1
        with torch.no_grad():
            logit = model(**pair).logits[0, 0]  # sentence-transformers gives its sigmoid
            assert own.score == pytest.approx(logit.sigmoid().item(), abs=1e-5)
    assert "empty" in scores[3].error_msg
    assert [own.index for own in llm.rerank("the cat", texts, use_tqdm=False)][-1] == 3
    (output,) = llm.embed("a", use_tqdm=False)
    assert "call LLM.rerank" in output.error_msg
    (score,) = llm.score("a", [{"prompt_token_ids": [5]}], use_tqdm=False)
    assert "must be a text" in score.error_msg
    (told,) = llm.score("a", ["b"], use_tqdm=False, instruction="find ")
    (plain,) = llm.score("find a", ["b"], use_tqdm=False)
    assert told.score == plain.score


def test_token_types_beside_prompts_without(reranker):
    """Types of a pair reach the model at its rows, zeros at those of others."""
    llm, _ = reranker
    seen, forward = [], llm.model.forward

    def watching(inputs):
        seen.append(inputs.token_types)
        return forward(inputs)

    llm.model.forward = watching
    try:
        llm.score("the cat", ["a dog"], use_tqdm=False)
    finally:
        del llm.model.forward
    pair = llm.get_tokenizer()("the cat", "a dog")
    assert (seen[-1] is None) == ("token_type_ids" not in pair)
    if seen[-1] is not None:
        assert seen[-1].tolist() == pair["token_type_ids"]


def test_a_context_longer_than_a_step_is_refused(bert, tmp_path):
    write_family(tiny.BERT, tmp_path)
    with pytest.raises(ConfigError, match="in one step of max_num_batched_tokens = 64"):
        LLM(tmp_path, **OPTIONS, max_num_batched_tokens=64, max_model_len=128)
    with LLM(tmp_path, **OPTIONS, max_num_batched_tokens=64) as llm:
        assert llm.runtime.max_model_len == 64
        assert all(own.is_ok for own in llm.embed(TEXTS * 4, use_tqdm=False))
