"""Encoders in the engine against sentence-transformers, which reads the same folder."""

import json

import numpy as np
import pytest
from mmdeploy_llm_plugins.bert import tiny

from mmdeploy_llm import LLM
from mmdeploy_llm.testing.tiny import write_family

TEXTS = ["the quick brown fox", "a", "hello there " * 9, "How many are there? There are two."]
OPTIONS = {"dtype": "float32", "quiet": True, "use_warmup": False}
MODULE = "sentence_transformers.models."
QUICK = ("MODERNBERT", "XLM_ROBERTA_RERANKER")


def marked(names):
    return [pytest.param(name, marks=[pytest.mark.full] * (name not in QUICK)) for name in names]


def write(name, folder):
    """Writes a checkpoint without the chat template that the library would render pairs with."""
    write_family(getattr(tiny, name), folder)
    (folder / "chat_template.jinja").unlink()


def write_modules(folder, pooling):
    lines = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": MODULE + kind}
        for index, (path, kind) in enumerate(lines)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    own = {"word_embedding_dimension": 64, f"pooling_mode_{pooling}": True}
    others = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(others | own))
    (folder / "2_Normalize").mkdir()


@pytest.mark.one_is_quick
@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens"])
@pytest.mark.parametrize(
    "name",
    marked(
        [
            "BERT",
            "EUROBERT",
            "GTE",
            "JINA",
            "MODERNBERT",
            "MPNET",
            "NOMIC",
            "ULTRABERT",
            "XLM_ROBERTA",
        ]
    ),
)
def test_vectors(name, pooling, tmp_path):
    from sentence_transformers import SentenceTransformer

    write(name, tmp_path)
    write_modules(tmp_path, pooling)
    expected = SentenceTransformer(str(tmp_path), device="cpu").encode(TEXTS)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = np.stack([output.embedding for output in llm.embed(TEXTS, use_tqdm=False)])
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    marked(["BERT_RERANKER", "GTE_RERANKER", "MODERNBERT_RERANKER", "XLM_ROBERTA_RERANKER"]),
)
def test_scores_of_pairs(name, tmp_path):
    from sentence_transformers import CrossEncoder

    write(name, tmp_path)
    pairs = [("the red circle", text) for text in TEXTS]
    expected = CrossEncoder(str(tmp_path), device="cpu").predict(pairs)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.score("the red circle", TEXTS, use_tqdm=False)
        ranked = llm.rerank("the red circle", TEXTS, 2, use_tqdm=False)
    np.testing.assert_allclose([output.score for output in outputs], expected, atol=2e-5)
    assert [output.index for output in ranked] == np.argsort(-expected)[:2].tolist()


def test_an_item_that_cannot_be_is_its_own_error(tmp_path):
    write_family(tiny.XLM_ROBERTA, tmp_path)
    picture = np.zeros((8, 8, 3), dtype=np.uint8)
    prompts = [
        TEXTS[0],
        {"prompt": "a", "multimodal_data": {"image": picture}},
        "y " * 200,
        "",
        "a",
    ]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        first, image, long, empty, last = llm.embed(prompts, use_tqdm=False)
        (alone,) = llm.embed("a", use_tqdm=False)
    assert (first.error_code, last.error_code) == (200, 200)
    assert "image" in image.error_msg
    assert "129 are allowed" in long.error_msg
    assert not empty.is_ok
    np.testing.assert_allclose(last.embedding, alone.embedding, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["MODERNBERT", "XLM_ROBERTA"])
def test_8_bits_change_vectors_little(name, tmp_path):
    write(name, tmp_path)
    found = []
    for quantization in (None, "int8"):
        with LLM(str(tmp_path), **OPTIONS, quantization=quantization) as llm:
            found.append(np.stack([own.embedding for own in llm.embed(TEXTS, use_tqdm=False)]))
    cosines = (found[0] * found[1]).sum(1)
    assert cosines.min() > 0.98
    assert not np.array_equal(*found)
