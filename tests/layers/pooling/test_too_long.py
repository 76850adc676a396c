"""Texts of more tokens than a model reads, and which limit counts, beside sentence-transformers."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdeploy_llm_plugins.bert import tiny

from mmdeploy_llm import LLM, AsyncLLM, ConfigError
from mmdeploy_llm.testing.tiny import write_family

pytestmark = pytest.mark.full
TEXT = "the quick brown fox, it jumps over a lazy dog; hello there " * 20
TEXTS = ["a cat", TEXT, "hello", TEXT[::-1]]
OPTIONS = {"dtype": "float32", "quiet": True, "use_warmup": False}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A sentence-transformers folder of the mean, made by sentence-transformers, and its size of
    positions."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    source, folder = (tmp_path_factory.mktemp(name) for name in ("tiny", "plain"))
    write_family(tiny.BERT, source)
    (source / "chat_template.jinja").unlink()  # of folders with one, texts are conversations
    first = modules.Transformer(str(source), max_seq_length=48)
    size = first.get_embedding_dimension()
    own = [first, modules.Pooling(size, "mean"), modules.Normalize()]
    made = SentenceTransformer(modules=own, prompts={"query": "find: "})
    made.save(str(folder))
    return folder


@pytest.fixture
def folder(plain, tmp_path):
    """folder(limit, of_tokenizer, of_file) -> a copy with these limits; "": none is written."""

    def with_limits(limit=48, of_tokenizer="", of_file=""):
        for path in plain.rglob("*"):
            target = tmp_path / path.relative_to(plain)
            if path.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        change(tmp_path / "sentence_bert_config.json", "max_seq_length", limit)
        change(tmp_path / "tokenizer_config.json", "model_max_length", of_tokenizer)
        if of_file:
            cut = {"max_length": of_file, "strategy": "LongestFirst", "stride": 0}
            change(tmp_path / "tokenizer.json", "truncation", {**cut, "direction": "Right"})
        return str(tmp_path)

    return with_limits


def change(path, key, value):
    values = json.loads(path.read_text()) if path.exists() else {}
    values.pop(key, None)
    path.write_text(json.dumps(values if value == "" else {**values, key: value}))


def theirs_of(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu")


@pytest.mark.parametrize(
    "limits",
    [
        (48, "", ""),
        (48, 96, 24),
        (96, 48, 24),
        (None, 40, ""),
        ("", 40, 24),
        (None, 10**30, 24),
        (None, "", ""),
        ("", 10**6, ""),
    ],
)
def test_the_limit_is_that_of_sentence_transformers(folder, limits):
    """sentence_bert_config.json says it first; else it is the smaller one of the tokenizer's and
    the model's positions. What tokenizer.json cuts at does not count."""
    name = folder(*limits)
    theirs = theirs_of(name)
    with LLM(name, **OPTIONS) as llm:
        whole, cut = llm.embed([TEXT * 4] * 2, use_tqdm=False, too_long="cut")
        assert len(cut.prompt_token_ids) == theirs.max_seq_length
        np.testing.assert_allclose(cut.embedding, theirs.encode(TEXT * 4), atol=2e-6)
        (refused,) = llm.embed(TEXT * 4, use_tqdm=False)
        assert f"{theirs.max_seq_length} are allowed" in refused.error_msg
    np.testing.assert_array_equal(whole.embedding, cut.embedding)


def test_a_limit_beyond_the_positions_is_theirs(folder):
    """sentence-transformers fails on such a text."""
    name = folder(10**5)
    positions = json.loads(Path(name, "config.json").read_text())
    with LLM(name, **OPTIONS) as llm:
        (cut,) = llm.embed(TEXT * 40, use_tqdm=False, too_long="cut")
        assert len(cut.prompt_token_ids) == positions["max_position_embeddings"]


def test_cut_texts_are_those_of_sentence_transformers(folder):
    name = folder()
    theirs = theirs_of(name)
    with LLM(name, **OPTIONS) as llm:
        found = llm.embed(TEXTS, use_tqdm=False, too_long="cut")
        expected = theirs.encode(TEXTS)
        np.testing.assert_allclose([o.embedding for o in found], expected, atol=2e-6)
        count = len(theirs.tokenizer(TEXT, truncation=False)["input_ids"])
        (note,) = found[1].media_notes
        assert note == f"the text has {count} tokens and the model reads 48: {count - 48} were cut"
        assert found[0].media_notes == ()
        asked = llm.embed(TEXTS, use_tqdm=False, too_long="cut", instruction="query")
        expected = theirs.encode(TEXTS, prompt_name="query")
        np.testing.assert_allclose([o.embedding for o in asked], expected, atol=2e-6)


def chunked(theirs, text, prefix=""):
    """Returns the mean of windows, each computed by sentence-transformers, by their tokens."""
    raw = theirs.tokenizer
    whole = raw(prefix + text, add_special_tokens=False, return_offsets_mapping=True)
    count = sum(end <= len(prefix) for _, end in whole["offset_mapping"])
    head, body = whole["input_ids"][:count], whole["input_ids"][count:]
    room = theirs.max_seq_length - 2 - len(head)
    vectors, counts = [], []
    for start in range(0, len(body), room):
        ids = [raw.cls_token_id, *head, *body[start : start + room], raw.sep_token_id]
        tokens = torch.tensor([ids])
        with torch.no_grad():
            own = theirs({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
        vectors.append(own["sentence_embedding"][0].numpy())
        counts.append(len(ids))
    mean = np.average(vectors, axis=0, weights=counts)
    return mean / np.linalg.norm(mean), len(counts)


@pytest.mark.parametrize("prefix", ["", "find: "])
def test_chunks_are_the_mean_of_windows(folder, prefix):
    name = folder()
    theirs = theirs_of(name)
    theirs.tokenizer.backend_tokenizer.no_truncation()
    instruction = "query" if prefix else None
    with LLM(name, **OPTIONS) as llm:
        found = llm.embed(TEXTS, use_tqdm=False, too_long="chunk", instruction=instruction)
        for output, text in zip(found, TEXTS, strict=True):
            expected, count = chunked(theirs, text, prefix)
            np.testing.assert_allclose(output.embedding, expected, atol=2e-6)
            told = [f"the mean of {count} windows"] if count > 1 else []
            assert [note.partition("vector is ")[2] for note in output.media_notes] == told
        (tokens,) = llm.embed(TEXT, use_tqdm=False, too_long="chunk", pooling="tokens")
        assert len(tokens.embedding) == len(tokens.prompt_token_ids)
        (short,) = llm.embed(TEXT, use_tqdm=False, too_long="chunk", dimensions=8)
        (whole,) = llm.embed(TEXT, use_tqdm=False, too_long="chunk")
        np.testing.assert_allclose(short.embedding, whole.embedding[:8], atol=1e-6)


def test_ways_beside_llm_embed(folder, tmp_path_factory):
    """Iterables, tasks, a process of its own, and a batch that is searched."""
    name = folder()
    with LLM(name, **OPTIONS) as llm:
        expected = [o.embedding for o in llm.embed(TEXTS, use_tqdm=False, too_long="chunk")]
        found = {o.item: o.embedding for o in llm.embed_iter(TEXTS, too_long="chunk")}
        np.testing.assert_allclose([found[text] for text in TEXTS], expected, atol=1e-6)
        rows = [{"id": str(n), "prompt": text} for n, text in enumerate([*TEXTS, "", " \n"])]
        output = str(tmp_path_factory.mktemp("out") / "out.jsonl")
        done = llm.embed_batch(rows, output, too_long="cut", use_tqdm=False)
        assert "2 records say what a model did not get" in " ".join(done.notes)
        lines = [json.loads(line) for line in Path(output).read_text().splitlines()]
        lines.sort(key=lambda own: int(own["id"]))
        assert [len(line.get("media_notes", ())) for line in lines] == [0, 1, 0, 1, 0, 0]
        assert all("empty" in line["error"]["message"] for line in lines[4:])
        (hits,) = llm.search(output, [TEXT], 1, too_long="cut")
        assert hits[0].id == "1"
        with pytest.raises(Exception, match="are allowed"):
            llm.search(output, [TEXT], 1)

    async def tasks():
        async with AsyncLLM(name, **OPTIONS) as llm:
            return await llm.embed(TEXTS, too_long="chunk")

    np.testing.assert_allclose([o.embedding for o in asyncio.run(tasks())], expected, atol=1e-6)


def test_empty_texts_are_the_same_error_everywhere(folder):
    with LLM(folder(), **OPTIONS) as llm:
        for text in ("", " ", "\n\t\u3000\u00a0"):
            for how in ("error", "cut", "chunk"):
                (output,) = llm.embed([text], use_tqdm=False, too_long=how)
                assert (output.error_code, "the prompt is empty" in output.error_msg) == (400, True)
            for pair in ((text, ["a"]), ("a", [text])):
                (score,) = llm.score(*pair, use_tqdm=False)
                assert (score.error_code, "the prompt is empty" in score.error_msg) == (400, True)


def test_a_wrong_choice_is_told(folder, tmp_path):
    with LLM(folder(), **OPTIONS) as llm:
        with pytest.raises(ValueError, match="'error', 'cut' or 'chunk'"):
            llm.embed("a", too_long="keep")
        with pytest.raises(ConfigError, match="error, cut, chunk"):
            llm.embed_batch([{"prompt": "a"}], str(tmp_path / "o.jsonl"), too_long="keep")
