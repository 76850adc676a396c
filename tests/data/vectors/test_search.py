"""Search and deduplication over files, and the table that --only reads."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmdeploy_llm.cli.options.selection import listed_ids
from mmdeploy_llm.client.vector_asks import vector_asks
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.data.vectors.origin import Origin, origin_of
from mmdeploy_llm.data.vectors.search import dedupe, number_of, open_vectors, search, vectors_at
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.pooling.abilities import Abilities
from mmdeploy_llm.layers.pooling.rules import EmbeddingRules


def write(path: Path, rows: dict[str, np.ndarray | None], *configs: Configuration) -> str:
    sink = open_sink(path)
    with sink.writer("new", Kept()) as writer:
        for config in configs:
            sink.configurations.write(config, (), is_new=False)
        for number, (name, own) in enumerate(rows.items()):
            if own is None:
                error = ItemError(code=400, kind="RequestError", message="broken")
                record = Record(id=name, line=number, error=error)
            else:
                vector = Vector.of(own.astype("f4"))
                record = Record(id=name, line=number, outcome="ok", embedding=vector)
            writer.write(record, number)
        writer.finish(lambda own: own.line)
    return str(path)


@pytest.fixture
def output(tmp_path: Path) -> str:
    rows = {
        "a": np.array([1, 0, 0]),
        "bad": None,
        "b": np.array([0.99, 0.1, 0]),
        "c": np.array([0, 1, 0]),
        "same as c": np.array([0, 2, 0]),
        "d": np.array([0, 0, 1]),
    }
    return write(tmp_path / "v.jsonl", rows)


def test_a_search_finds_records(output: str) -> None:
    (hits,) = search(open_vectors(output), [np.array([1, 0, 0], "f4")], 2)
    assert [hit.id for hit in hits] == ["a", "b"]
    assert hits[0].score == pytest.approx(1)
    assert json.loads(json.dumps(hits[1].to_dict())) == {
        "id": "b",
        "score": pytest.approx(0.9949, abs=1e-4),
    }


def test_an_item_is_a_query(output: str) -> None:
    vectors = open_vectors(output)
    number = number_of(vectors, "c")
    query = vectors_at(vectors, [number])[number]
    (hits,) = search(vectors, [query], 1, excluded=[number])
    assert [hit.id for hit in hits] == ["same as c"]
    with pytest.raises(ConfigError, match="no item with the id 'z'"):
        number_of(vectors, "z")


def test_near_duplicates_are_a_table(output: str, tmp_path: Path) -> None:
    found = dedupe(open_vectors(output), 0.95, use_tqdm=False)
    assert (found.groups.num_groups, found.groups.num_duplicates) == (2, 2)
    assert found.kept == ["a", "bad", "c", "d"]
    found.write(tmp_path / "t.csv")
    with open(tmp_path / "t.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["keep"], row["group"], row["nearest"]) for row in rows] == [
        ("a", "yes", "1", "b"),
        ("bad", "yes", "", ""),
        ("b", "no", "1", "a"),
        ("c", "yes", "2", "same as c"),
        ("same as c", "no", "2", "c"),
        ("d", "yes", "", ""),
    ]
    assert rows[3]["similarity"] == "1.0000"
    found.write(tmp_path / "t.txt")
    assert (tmp_path / "t.txt").read_text().split("\n") == ["a", "bad", "c", "d", ""]


@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_only_reads_the_table(output: str, tmp_path: Path, suffix: str) -> None:
    dedupe(open_vectors(output), use_tqdm=False).write(tmp_path / f"t.{suffix}")
    assert listed_ids([f"@{tmp_path}/t.{suffix}"]) == ["a", "bad", "c", "d"]


def test_ids_of_any_characters_survive_the_table(tmp_path: Path) -> None:
    names = ['quo"te', "com,ma", "line\nbreak", " space ", "ü", "=1+1"]
    rows = {name: np.eye(6)[number] for number, name in enumerate(names)}
    found = dedupe(open_vectors(write(tmp_path / "v.jsonl", rows)), use_tqdm=False)
    found.write(tmp_path / "t.csv")
    assert listed_ids([f"@{tmp_path}/t.csv"]) == names
    with pytest.raises(ConfigError, match=r"has a line break; write the table as \.csv"):
        found.write(tmp_path / "t.txt")
    assert not (tmp_path / "t.txt").exists()


def test_a_list_has_no_id_that_only_would_divide(tmp_path: Path) -> None:
    rows = {"a\u2028b": np.eye(2)[0], "c": np.eye(2)[1]}
    found = dedupe(open_vectors(write(tmp_path / "v.jsonl", rows)), use_tqdm=False)
    with pytest.raises(ConfigError, match="is empty or has a line break"):
        found.write(tmp_path / "t.txt")


def test_a_table_of_others_is_no_list(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("name,keep\na,yes\n")
    with pytest.raises(ConfigError, match="no columns id and keep"):
        listed_ids([f"@{tmp_path}/x.csv"])


def test_targets_that_cannot_be_written_are_told(output: str, tmp_path: Path) -> None:
    found = dedupe(open_vectors(output), use_tqdm=False)
    with pytest.raises(ConfigError, match=r"must end in \.csv"):
        found.write(tmp_path / "t.xlsx")
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(ConfigError, match="exists already"):
        found.write(tmp_path / "t.csv")
    found.write(tmp_path / "t.csv", overwrite=True)
    with pytest.raises(ConfigError, match="does not exist"):
        found.write(tmp_path / "none" / "t.csv")


def test_a_file_without_vectors_is_told(tmp_path: Path) -> None:
    vectors = open_vectors(write(tmp_path / "v.jsonl", {"a": None}))
    with pytest.raises(ConfigError, match="has 1 items and no vector: `mmdeploy-llm embed`"):
        search(vectors, [np.ones(3, "f4")])
    with pytest.raises(ConfigError, match="no vector"):
        dedupe(vectors, use_tqdm=False)


def made(model: str, **values: object) -> Configuration:
    return Configuration(model=model, values={"model": f"digest of {model}", **values})


def test_the_origin_of_vectors_is_their_configuration(tmp_path: Path) -> None:
    config = made("m", **{"vectors.what": "vector", "vectors.dimensions": 64})
    name = write(tmp_path / "v.jsonl", {"a": np.ones(3)}, config)
    origin = origin_of(open_vectors(name))
    assert origin.model == "m"
    query = origin.query("find")
    assert (query.what, query.dimensions, query.instruction) == (None, 64, "find")
    origin.check({"model": "digest of m"})
    with pytest.raises(ConfigError, match="are of 'm' as its files were then"):
        origin.check({"model": "digest of n"})


def test_vectors_of_two_models_have_no_origin(output: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing says of which model"):
        origin_of(open_vectors(output))
    name = write(tmp_path / "w.jsonl", {"a": np.ones(3)}, made("m"), made("n"))
    with pytest.raises(ConfigError, match=r"made in 2 ways \(m, n\)"):
        origin_of(open_vectors(name))
    other = write(tmp_path / "x.jsonl", {"a": np.ones(3)}, made("m"), made("m", prompt="p"))
    assert isinstance(origin_of(open_vectors(other)), Origin)


def test_items_of_a_corpus_are_documents_and_queries_are_none() -> None:
    asks = vector_asks(dimensions=8, normalize=False)
    assert asks.wanted is not None
    values = asks.values()
    assert values == {"vectors.what": "vector", "vectors.dimensions": 8, "vectors.normalize": False}
    query = Origin(model="m", values=values).query()
    assert not query.is_document
    abilities = Abilities(rules=EmbeddingRules(document_prompt="document", query_prompt="query"))
    assert abilities.instruction_of(asks.wanted) == "document"
    assert abilities.instruction_of(vector_asks(instruction="x").wanted) == "x"
    assert abilities.instruction_of(query) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [({"pooling": "max"}, "pooling must be one of"), ({"dimensions": 0}, "must be at least 1")],
)
def test_a_wish_that_is_none_is_told(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        vector_asks(**given)
