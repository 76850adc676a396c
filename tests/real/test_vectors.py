"""Vectors of real texts, against sentence-transformers."""

import numpy as np

from mmdeploy_llm import LLM
from tests.real.packages import folder_of
from tests.real.vectors import TEXTS, texts, vectors


def test_vectors_are_those_of_sentence_transformers():
    found = vectors()
    assert found.ours.shape == found.theirs.shape == (TEXTS, 384)
    assert found.largest_difference < 1e-6


def test_vectors_in_bfloat16_point_the_same_way():
    assert vectors(dtype="bfloat16").smallest_cosine > 0.9995


def test_a_search_finds_what_sentence_transformers_finds():
    """The scores of the ten nearest texts of thirty of them; of equal texts either may be first."""
    found = vectors()
    ours, theirs = (side[:30] @ side.T for side in (found.ours, found.theirs))
    nearest = (-ours).argsort(1)[:, :10], (-theirs).argsort(1)[:, :10]
    scores = [np.take_along_axis(theirs, places, 1) for places in nearest]
    assert np.abs(scores[0] - scores[1]).max() < 1e-6


def test_long_texts_are_cut_as_sentence_transformers_cuts_them():
    """Whole chapters: tokenizer.json says 128 tokens, sentence_bert_config.json 256."""
    from sentence_transformers import SentenceTransformer

    folder, book = str(folder_of("minilm")), " ".join(texts())
    chapters = [book[900 * count :][: 700 * count] for count in range(1, 11)]
    with LLM(model=folder, dtype="float32") as llm:
        found = llm.embed(chapters, use_tqdm=False, on_error="raise", too_long="cut")
    assert [len(own.prompt_token_ids) for own in found[2:]] == [256] * 8
    theirs = SentenceTransformer(folder, device="cpu").encode(chapters, show_progress_bar=False)
    assert np.abs(np.stack([own.embedding for own in found]) - theirs).max() < 1e-6


def test_vectors_do_not_depend_on_what_is_asked_beside_them():
    with LLM(model=str(folder_of("minilm")), dtype="float32") as llm:
        together = llm.embed(texts()[:40], use_tqdm=False, on_error="raise")
        (alone,) = llm.embed([texts()[7]], use_tqdm=False, on_error="raise")
    assert abs(together[7].embedding - alone.embedding).max() < 1e-6
