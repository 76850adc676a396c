"""Mutations of what batches are made of, by the thousand: lines, folders of `datasets`, Lance
tables. Each ends in rows or errors, every row once, and nothing else is raised."""

import json
import math
import os
import random

import pytest

from mmdeploy_llm.data.rows.formats import folders
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem, FirstLines, Row
from mmdeploy_llm.errors import ConfigError

NUM_MUTATIONS = 10_000
ALL = FirstLines(count=10**15)
VALUES = (0, -1, 1, 7.5, 1e10, 1e308, -1e308, 1e-320, 10**400, -(10**400), 2**31, 2**53 + 1)
VALUES += (2**63, -(2**63) - 1, 2**64, math.nan, math.inf, -math.inf, True, None, "7", "", [], {})
LINE = {
    "id": "a",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "sampling_params": {
        "n": 1,
        "max_tokens": 1,
        "min_tokens": 0,
        "reasoning_max_tokens": 1,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 1,
        "min_p": 0.0,
        "seed": 1,
        "logprobs": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "stop": ["x"],
        "stop_token_ids": [1],
        "bad_words": ["y"],
        "logit_bias": {"1": 1.0},
    },
    "priority": 1,
    "timeout": 100,
    "chat_template_kwargs": {"enable_thinking": False},
    "mm_processor_kwargs": {"max_pixels": 10_000},
}


def places(value, path=()):
    """Yields the path of every value within a value."""
    yield path
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for name, item in pairs:
        yield from places(item, (*path, name))


def changed(source, line):
    """Returns a copy of the line in which one or two values are others."""
    line = json.loads(json.dumps(line))
    for _ in range(source.randint(1, 2)):
        *path, last = source.choice([path for path in places(line) if path])
        parent = line
        for name in path:
            parent = parent[name]
        parent[last] = source.choice(VALUES)
    return line


def damaged(source, text):
    """Returns the bytes of a text with some of them changed."""
    blob = bytearray(text.encode())
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(blob))
        other = source.randrange(len(blob))
        way = source.randrange(4)
        if way == 0:
            blob[at] ^= 1 << source.randrange(8)
        elif way == 1:
            blob[at : at + 1] = source.choice(
                (b"\n", b'"', b"[", b"{", b"\0", b"\xff", b"../", b"/")
            )
        elif way == 2:
            blob[at : at + 9] = blob[other : other + 9]
        else:
            del blob[at : at + 5]
    return bytes(blob)


def run_lines(tmp_path, lines):
    """Answers a batch of lines and returns the line number of each record."""
    from mmdeploy_llm import LLM, SamplingParams

    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with LLM("shapes-vl", num_threads=1, use_warmup=False) as llm:
        summary = llm.run_batch(
            str(tmp_path / "in.jsonl"),
            str(tmp_path / "out.jsonl"),
            sampling_params=SamplingParams(max_tokens=1),
            use_tqdm=False,
        )
    assert summary.ending == "done"
    with (tmp_path / "out.jsonl").open() as file:
        return sorted(json.loads(text)["line"] for text in file)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(100, marks=pytest.mark.full),
        pytest.param(NUM_MUTATIONS, marks=pytest.mark.long),
    ],
)
def test_lines_with_numbers_of_every_size_in_every_field(tmp_path, count):
    source = random.Random(count)
    lines = [changed(source, {**LINE, "id": f"a{number}"}) for number in range(count)]
    assert run_lines(tmp_path, lines) == list(range(1, count + 1))


@pytest.mark.parametrize("count", [30, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)])
def test_metadata_of_a_folder(tmp_path, count):
    source = random.Random(count)
    (tmp_path / "0.png").touch()
    (tmp_path / "README.md").write_text("---\nconfigs:\n- data_files: ../x.csv\n---\n")
    lines = "".join(json.dumps({"file_name": f"{n}.png", "title": "a"}) + "\n" for n in range(9))
    texts = {"metadata.jsonl": lines, "metadata.csv": "file_name,title\n" + "0.png,a\n" * 9}
    for number in range(count):
        name = source.choice(list(texts))
        (tmp_path / name).write_bytes(damaged(source, texts[name]))
        rows = list(open_rows(str(tmp_path)).read(ALL))
        assert len({row.line for row in rows}) == len(rows), number
        for row in rows:
            assert isinstance(row, (Row, BadItem))
            image = row.values.get("image") if isinstance(row, Row) else None
            if isinstance(image, dict):
                path = os.path.normpath(image["path"])
                assert path.startswith(f"{tmp_path}/"), number
        (tmp_path / name).unlink()


@pytest.mark.parametrize("count", [100, pytest.param(NUM_MUTATIONS, marks=pytest.mark.long)])
def test_the_state_of_a_saved_dataset(tmp_path, monkeypatch, count):
    """What would be opened lies beneath the folder, whatever is listed."""
    monkeypatch.setattr(folders, "TableRows", lambda spec: spec.files)
    source = random.Random(count)
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.arrow").touch()
        (tmp_path / name / "dataset_info.json").write_text("{}")
    state = json.dumps({"_data_files": [{"filename": "0.arrow"}] * 3, "_indices_files": None})
    splits, opened = json.dumps({"splits": ["train"]}), 0
    for _ in range(count):
        is_state = source.random() < 0.5
        state_blob = damaged(source, state) if is_state else state.encode()
        (tmp_path / "train/state.json").write_bytes(state_blob)
        blob = splits.encode() if is_state else damaged(source, splits)
        (tmp_path / "dataset_dict.json").write_bytes(blob)
        try:
            files = open_rows(str(tmp_path))
        except ConfigError:
            continue
        opened += 1
        for file in files:
            assert os.path.realpath(file.path).startswith(f"{os.path.realpath(tmp_path)}/")
    assert opened


@pytest.mark.full
@pytest.mark.parametrize("count", [4, pytest.param(300, marks=pytest.mark.long)])
def test_lance_tables(tmp_path, count):
    lance = pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
    columns = {"x": [f"text {n}" for n in range(60)], "b": [bytes([n]) * 300 for n in range(60)]}
    path = tmp_path / "a.lance"
    lance.write_dataset(pyarrow.table(columns), str(path), max_rows_per_file=20)
    sound = {own: own.read_bytes() for own in path.rglob("*") if own.is_file()}
    source = random.Random(count)
    num_good = 0
    for _ in range(count):
        name = source.choice([own for own in sound if own.suffix in (".lance", ".manifest")])
        blob = bytearray(sound[name])
        for _ in range(source.randint(1, 3)):
            blob[source.randrange(len(blob))] ^= 1 << source.randrange(8)
        name.write_bytes(blob if source.random() < 0.8 else blob[: source.randrange(len(blob))])
        try:
            rows = list(open_rows(str(path)).read(FirstLines(count=1000)))
        except ConfigError:
            rows = []
        lines = [row.line for row in rows]
        assert lines == sorted(set(lines))
        num_good += sum(isinstance(row, Row) for row in rows)
        name.write_bytes(sound[name])
    assert num_good


@pytest.mark.full
def test_a_lance_table_that_names_files_elsewhere_is_refused(tmp_path):
    lance = pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
    lance.write_dataset(pyarrow.table({"x": ["SECRET"]}), str(tmp_path / "secret.lance"))
    secret = lance.dataset(str(tmp_path / "secret.lance"))
    secret.tags.create("one", 1)
    secret.shallow_clone(str(tmp_path / "mine.lance"), "one")
    assert lance.dataset(str(tmp_path / "mine.lance")).count_rows() == 1
    with pytest.raises(ConfigError, match="not beneath it"):
        open_rows(str(tmp_path / "mine.lance"))
