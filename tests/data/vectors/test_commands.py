"""The commands embed, search and dedupe, as a user gives them."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from typer.testing import CliRunner, Result

from mmdeploy_llm.cli.program import app
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import Record

COLOURS = ("red", "green", "blue", "black")
NUM_PICTURES = 12


def run(*words: str, code: int = 0) -> Result:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == code, done.output
    return done


def draw(folder: Path, num: int) -> None:
    folder.mkdir()
    generator = random.Random(0)
    for number in range(num):
        colour = COLOURS[number % len(COLOURS)]
        picture = Image.new("RGB", (56, 56), "white")
        left, top = generator.randint(4, 20), generator.randint(4, 20)
        ImageDraw.Draw(picture).rectangle((left, top, left + 28, top + 28), fill=colour)
        picture.save(folder / f"{number:02d}-{colour}.png")


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An output that no model has made."""
    monkeypatch.chdir(tmp_path)
    sink = open_sink("v.npy")
    angles = {"a": 0.0, "b": 0.05, "c": 1.5, "d": 1.52, "e": 3.0}
    with sink.writer("new", Kept()) as writer:
        for line, (name, own) in enumerate(angles.items()):
            vector = Vector.of(np.array([np.cos(own), np.sin(own)], "f4"))
            writer.write(Record(id=name, line=line, outcome="ok", embedding=vector), line)
        writer.finish(lambda own: own.line)
    return "v.npy"


@pytest.mark.full
def test_an_item_is_searched_for_without_a_model(stored: str) -> None:
    lines = run("search", stored, "--like", "c", "-k", "2").stdout.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["d", "b"]
    table = [line.split("\t") for line in lines]
    assert table[0] == ["rank", "score", "item"]
    assert [row[0] for row in table[1:]] == ["1", "2"]
    assert [float(row[1]) for row in table[1:]] == pytest.approx(
        [np.cos(0.02), np.cos(1.45)], abs=1e-4
    )
    found = json.loads(run("search", stored, "--like", "a", "--json").stdout)
    assert [own["id"] for own in found] == ["b", "c", "d", "e"]
    run("search", stored, "--like", "a", "--report", "page.html")
    assert "0.9988" in Path("page.html").read_text()


def test_near_duplicates_are_counted_and_written(stored: str) -> None:
    done = run("dedupe", stored, "--threshold", "0.99", "-o", "g.csv")
    assert "5 items: 2 groups with 2 near-duplicates; 3 are kept" in done.stdout
    with open("g.csv", newline="") as file:
        assert [row["keep"] for row in csv.DictReader(file)] == ["yes", "no", "yes", "no", "yes"]
    counts = json.loads(run("dedupe", stored, "-o", "k.txt", "--json").stdout)
    assert counts["num_kept"] == 3
    assert Path("k.txt").read_text().split() == ["a", "c", "e"]


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("search", "v.npy"), "give what to search for"),
        (("search", "v.npy", "text", "--like", "a"), "give what to search for"),
        (("search", "v.npy", "--like", "a", "--instruction", "x"), "--instruction is of a QUERY"),
        (("search", "v.npy", "--like", "a", "--model", "shapes-vl"), "and so is --model"),
        (("search", "v.npy", "--like", "z"), "no item with the id 'z'"),
        (("search", "none.npy", "text"), "'none.npy' does not exist"),
        (("search", "v.npy", "text"), "name the model with --model"),
        (("search", "v.npy", "--like", "a", "--similarity", "l2"), "must be cosine or dot"),
        (("search", "v.npy", "--like", "a", "--report", "v.npy"), "v.npy"),
        (("dedupe", "v.npy", "--threshold", "1.5"), "above 0 and at most 1"),
        (("dedupe", "v.npy", "-o", "g.xlsx"), "must end in .csv"),
        (("dedupe", "*.parquet"), "no output fits"),
        (("embed", "v.npy", "-o", "v.csv"), ""),
        (("embed",), "give INPUT"),
        (("embed", "x.jsonl", "--pooling", "max"), "pooling must be one of"),
        (("embed", "x.jsonl", "--too-long", "no"), "--too-long must be one of error, cut, chunk"),
        (
            ("search", "v.npy", "a", "--too-long", "no"),
            "--too-long must be one of error, cut, chunk",
        ),
    ],
)
def test_mistakes_are_told(stored: str, words: tuple[str, ...], said: str) -> None:
    Path("x.jsonl").write_text('{"prompt": "a red circle"}\n')
    done = run(*words, code=2)
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.output


def test_a_batch_writes_no_arrays_and_embed_no_tables(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n')
    name = str(tmp_path / "x.jsonl")
    done = run("batch", name, "-o", str(tmp_path / "o.npy"), code=2)
    assert "`mmdeploy-llm embed` writes" in done.stderr
    done = run("embed", name, "-o", str(tmp_path / "o.csv"), code=2)
    assert "holds no vectors: write NAME.parquet" in done.stderr


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and the outputs of `embed` about them."""
    folder = tmp_path_factory.mktemp("embedded")
    draw(folder / "pics", NUM_PICTURES)
    (folder / "pics" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    words = ("embed", str(folder / "pics"), "--report", str(folder / "v.html"))
    done = run(*words, "-o", str(folder / "v.parquet"), "--part-items", "5", code=1)
    assert f"{NUM_PICTURES} embedded, 1 failed" in done.stdout
    return folder


@pytest.mark.full
def test_a_folder_becomes_searchable(embedded: Path) -> None:
    query = str(embedded / "pics" / "00-red.png")
    done = run("search", str(embedded / "v.parquet"), "--image", query, "-k", "3", "--json")
    first, *others = json.loads(done.stdout)
    assert first["id"] == "00-red.png"
    assert first["score"] == pytest.approx(1, abs=1e-3)
    assert len(others) == 2
    assert "shapes-vl is a demonstration" in done.stderr
    page = (embedded / "v.html").read_text()
    assert "Nearest neighbours of 10 random items" in page
    assert page.count("<figcaption") == 10 * 7


@pytest.mark.full
def test_what_is_left_is_done_and_nothing_else(embedded: Path) -> None:
    output = str(embedded / "v.parquet")
    words = ("embed", str(embedded / "pics"), "-o", output, "--resume")
    done = run(*words, code=1)
    assert "0 embedded, 1 failed in" in done.stdout
    done = run(
        "embed", str(embedded / "pics"), "-o", output, "--resume", "--dimensions", "8", code=2
    )
    assert "vectors.dimensions is 8, was not set" in done.stderr


@pytest.mark.full
def test_a_query_that_cannot_be_embedded_is_told(embedded: Path) -> None:
    output, broken = str(embedded / "v.parquet"), str(embedded / "pics" / "broken.png")
    assert "the query cannot be embedded" in run("search", output, "--image", broken, code=2).stderr


@pytest.mark.full
def test_vectors_of_another_model_are_refused(
    embedded: Path, tiny_folder: Callable[..., Path]
) -> None:
    other = str(tiny_folder("qwen3"))
    done = run("search", str(embedded / "v.parquet"), "a", "--model", other, code=2)
    assert "those of this model differ" in done.stderr


@pytest.mark.full
def test_rows_lines_and_texts_are_embedded(tmp_path: Path) -> None:
    draw(tmp_path / "pics", 2)
    rows = [
        {"id": "text", "prompt": "a red square"},
        {"id": "picture", "multimodal_data": {"image": ["pics/00-red.png"]}},
        {"id": "chat", "messages": [{"role": "user", "content": "Hello."}]},
        {"id": "two", "prompt": "a", "ask": {"x": "What?"}},
        {"id": "params", "prompt": "a", "sampling_params": {"max_tokens": 3}},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("embed", str(tmp_path / "x.jsonl"), "-o", str(tmp_path / "v.jsonl"), code=1)
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    found = {line["id"]: line for line in lines}
    for name in ("text", "picture", "chat"):
        assert found[name]["embedding"]["shape"] == [192]
        assert found[name]["outcome"] == "ok"
    assert "embedding" not in found["two"]
    assert found["two"]["error"]["code"] == 400
    assert "sampling parameters (max_tokens) have no meaning" in found["params"]["error"]["message"]
    (tmp_path / "t.csv").write_text("id,title\n1,a red square\n2,a blue circle\n")
    table = ("embed", str(tmp_path / "t.csv"), "--prompt", "{title}")
    run(*table, "-o", str(tmp_path / "t.npy"), "--dimensions", "8")
    assert np.load(tmp_path / "t.npy" / "part-00000.npy").shape == (2, 8)
    ids = (tmp_path / "t.npy" / "ids.jsonl").read_text().splitlines()
    assert {json.loads(line)["id"] for line in ids} == {"1", "2"}


@pytest.mark.full
def test_a_script_does_what_the_commands_do(embedded: Path, tmp_path: Path) -> None:
    from mmdeploy_llm import LLM, ConfigError
    from mmdeploy_llm.data.vectors.search import dedupe, open_vectors

    pics, output = embedded / "pics", tmp_path / "v.npy"
    with LLM("shapes-vl", quiet=True) as llm:
        summary = llm.embed_batch(pics, output, use_tqdm=False)
        assert summary.outcomes == {"ok": NUM_PICTURES, "failed": 1}
        (own,) = llm.embed({"multimodal_data": {"image": str(pics / "00-red.png")}}, use_tqdm=False)
        query = {"multimodal_data": {"image": str(pics / "00-red.png")}}
        ((first, *_), (other, *_)) = llm.search(output, [query, "a red square"], 2)
        assert first.id == "00-red.png"
        assert other.score < first.score
        vectors = open_vectors([output, embedded / "v.parquet"])
        assert len(vectors.notes()) == 1  # all are there twice
        kept = dedupe(vectors, 0.9999, use_tqdm=False).kept
        assert len(kept) == NUM_PICTURES + 1
        np.save(tmp_path / "others.npy", np.load(output / "part-00000.npy"))
        plain, told = (
            llm.search(str(tmp_path / "others.npy"), ["a red square"], 1, instruction=own)[0][0]
            for own in (None, "Find this: ")
        )
        assert plain.score != told.score  # also where nothing says how the vectors were made
        with pytest.raises(ConfigError, match="embed_batch has no argument 'system'"):
            llm.embed_batch(pics, output, system="x")  # type: ignore[call-arg]
    stored = np.load(output / "part-00000.npy")
    assert any(np.allclose(row, own.embedding, atol=1e-2) for row in stored)
