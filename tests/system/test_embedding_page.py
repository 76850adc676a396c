"""The blocks of docs/embeddings.md that need weights run on tiny models of the same families, whose
names are put in place of the published ones."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
PAGE = Path(__file__).parents[2] / "docs/embeddings.md"
BLOCK = re.compile(r"^<!-- not run: needs weights[^\n]*-->\n```python\n(.*?)^```$", re.M | re.S)
NAME = re.compile(r'"(Qwen/[\w.-]+)"')
PHOTOS = ("picture-1.png", "picture-5.png")
FAMILIES = {
    "Qwen/Qwen3-Embedding-0.6B": "qwen3",
    "Qwen/Qwen3-VL-Embedding-2B": "qwen3_vl",
    "Qwen/Qwen3-VL-Reranker-2B": "qwen3_vl",
}
LINE = "sentence_transformers.models.{}"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": LINE.format("Transformer")},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": LINE.format("Pooling")},
]


def code_blocks():
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def write_rules(folder):
    """Adds the files by which the folder is one of sentence-transformers."""
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    prompts = {"prompts": {"query": "Instruct: find it\nQuery:"}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def test_every_model_of_the_page_is_one_that_runs_here():
    named = [name for code in code_blocks() for name in NAME.findall(code)]
    assert set(named) == set(FAMILIES)


@pytest.mark.parametrize("code", code_blocks(), ids=lambda code: NAME.search(code)[1])
def test_a_block_runs(code, tiny_copy, tmp_path, monkeypatch, capsys):
    name = NAME.search(code)[1]
    folder = tiny_copy(FAMILIES[name], tmp_path / "model")
    if name == "Qwen/Qwen3-Embedding-0.6B":
        write_rules(folder)
    else:  # the words of its answer are tokens
        add_words(folder)
    photos = tmp_path / "photos"
    photos.mkdir()
    for own, source in zip(("a.png", "b.png"), PHOTOS, strict=True):
        (photos / own).write_bytes((PAGE.parents[1] / "examples/images" / source).read_bytes())
    monkeypatch.chdir(tmp_path)
    small = code.replace(f'"{name}"', f'"{folder}", max_model_len=2048, kv_cache_memory=2**26')
    exec(compile(small, str(PAGE), "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) >= 2


def add_words(folder):
    """Gives two tokens of the tiny vocabulary the names of the words."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    spares = sorted(vocabulary, key=vocabulary.get)[-2:]
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) not in spares]
    for word, spare in zip(("yes", "no"), spares, strict=True):
        vocabulary[word] = vocabulary.pop(spare)
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
