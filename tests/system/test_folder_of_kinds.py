"""A folder with sound, documents, pictures and a kind of another package is captioned by one
command; every door of a batch works with that kind."""

import importlib
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.testing.tiny import write_tiny
from tests.media.sound_files import noise, wav16
from tests.processors.pdfs import simple_pdf

pytestmark = pytest.mark.full  # it runs the whole program twenty times

SKETCH = b'SKETCH1 ["red", "blue"]'
SHORT = ("--max-tokens", "2", "--sampling", "ignore_eos=true")


@pytest.fixture(scope="module")
def sketches(tmp_path_factory):
    """Installs the plugin as pip does: a module and its metadata on sys.path."""
    site = tmp_path_factory.mktemp("site")
    shutil.copy(Path(__file__).parent / "sketches.py", site)
    info = site / "sketches_llm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sketches-llm\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mmdeploy_llm]\nsketches = sketches\n")
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(site))
    sys.modules.pop("sketches", None)
    importlib.invalidate_caches()


def picture(colour="green"):
    file = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("files")
    (found / "a.wav").write_bytes(wav16(noise(seconds=0.5)))
    (found / "b.PDF").write_bytes(simple_pdf(["one", "two"]))
    (found / "c.jpg").write_bytes(picture())
    (found / "d.sketch").write_bytes(SKETCH)
    (found / "e.dat").write_bytes(SKETCH)
    (found / "f.txt").write_text("nothing to see")
    return found


def run(*words):
    result = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


def records_of(path):
    return {record.id: record for record in read_records(path)}


@pytest.fixture(scope="module")
def captioned(sketches, folder, tmp_path_factory):
    """A model that sees and hears."""
    model = write_tiny("qwen2_5_omni", tmp_path_factory.mktemp("omni"))
    out = tmp_path_factory.mktemp("out") / "captions.jsonl"
    return out, *run("caption", folder, "-m", model, "-o", out, *SHORT)


def test_one_command_captions_all_of_them(captioned, folder):
    out, code, said = captioned
    found = records_of(out)
    assert (code, {record.error for record in found.values()}) == (0, {None}), said
    assert {name: [own.kind for own in record.media] for name, record in found.items()} == {
        "a.wav": [],  # its name says it
        "b.PDF": ["pdf"],
        "c.jpg": [],
        "d.sketch": ["sketch"],
        "e.dat": ["sketch"],
    }
    assert "5 captioned" in said
    assert "skipped 1 file: 1 .txt" in said
    assert found["a.wav"].num_tokens_by_kind["audio"] > 0
    assert found["b.PDF"].num_image_tokens > 0
    assert found["d.sketch"].num_image_tokens == 2 * found["c.jpg"].num_image_tokens
    assert found["d.sketch"].text == found["e.dat"].text


def test_the_report_plays_the_sound_and_shows_pages(captioned, folder):
    page = captioned[0].with_suffix(".html").read_text()
    cards = {
        name: page.partition(f'aria-label="{name}"')[2].partition("</article>")[0]
        for name in ("a.wav", "b.PDF", "c.jpg", "d.sketch")
    }
    assert cards["a.wav"].count('src="data:audio/mpeg') == 1
    assert {name: card.count("<img ") for name, card in cards.items()} == {
        "a.wav": 0,
        "b.PDF": 2,
        "c.jpg": 1,
        "d.sketch": 2,
    }
    assert "Describe the audio. Describe the pdf. Describe the image. Describe the sketch." in page


def test_what_a_model_does_not_take_is_told_once_and_what_is_asked_for_is_chosen(folder, tmp_path):
    """They are told without the plugin, by a model that has only eyes."""
    blocked = ("--engine", 'blocked_plugins=["sketches"]')
    out, listed = tmp_path / "a.jsonl", tmp_path / "skipped.jsonl"
    code, said = run("caption", folder, "-o", out, "--skipped", listed, *blocked, *SHORT)
    assert (code, set(records_of(out))) == (0, {"b.PDF", "c.jpg"})
    assert "1 .wav (this model takes no audio)" in said
    assert "this model takes no audio" in out.with_suffix(".html").read_text()
    lines = {
        Path(line["skipped"]).name: line
        for line in map(json.loads, listed.read_text().splitlines())
    }
    assert "it is of the kind audio, and this model takes image" in lines["a.wav"]["reason"]
    again = ("caption", folder, *blocked)
    code, said = run(*again, "-o", tmp_path / "b.jsonl", "--kinds", "pdf", *SHORT)
    assert (code, set(records_of(tmp_path / "b.jsonl"))) == (0, {"b.PDF"})
    assert "1 .jpg (--kinds)" in said
    for kinds, words in (("audio", "takes no audio"), ("pfd", "did you mean 'pdf'")):
        code, said = run(*again, "-o", tmp_path / "c.jsonl", "--kinds", kinds)
        assert (code, words in said) == (2, True), said


def rows(given):
    return [{"id": "x", "drawing": {"bytes": SKETCH, "path": "x.sketch"}, "title": "t"}]


def write_parquet(folder):
    pq.write_table(pa.Table.from_pylist(rows(folder)), folder / "in.parquet")
    return folder / "in.parquet"


def write_arrow(folder):
    table = pa.table({"it": [SKETCH], "title": ["t"]})  # found by its bytes
    with (
        pa.OSFile(str(folder / "in.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as w,
    ):
        w.write_table(table)
    return folder / "in.arrow"


def write_tar(folder):
    with tarfile.open(folder / "in.tar", "w") as tar:
        for name, data in (("x.sketch", SKETCH), ("x.json", b'{"title": "t"}')):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return folder / "in.tar"


def write_csv(folder):
    (folder / "x.sketch").write_bytes(SKETCH)
    (folder / "in.csv").write_text("sketch,title\nx.sketch,t\n")
    return folder / "in.csv"


def write_lines(folder):
    (folder / "x.sketch").write_bytes(SKETCH)
    part = {"type": "sketch", "sketch": "x.sketch"}
    line = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    return folder / "in.jsonl"


def write_openai(folder):
    (folder / "x.sketch").write_bytes(SKETCH)
    part = {"type": "sketch_url", "sketch_url": {"url": "x.sketch"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
    line = {"custom_id": "x", "url": "/v1/chat/completions", "body": body}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    return folder / "in.jsonl"


def write_described(folder):
    (folder / "media").mkdir()
    (folder / "media" / "x.sketch").write_bytes(SKETCH)
    (folder / "media" / "metadata.csv").write_text("file_name,title\nx.sketch,t\n")
    return folder / "media"


FORMS = (
    write_parquet,
    write_arrow,
    write_tar,
    write_csv,
    write_lines,
    write_openai,
    write_described,
)


@pytest.mark.parametrize("write", FORMS)
def test_every_format_of_a_corpus_holds_the_kind(sketches, write, tmp_path):
    """All are counted alike, without the weights: 2 sheets of a sketch."""
    code, said = run("count", write(tmp_path), "--json")
    [line, *_] = map(json.loads, said.splitlines()[-1:])
    assert (code, line["error"]) == (0, None), said
    assert line["num_input_image_tokens"] == 2 * 16


def test_every_option_of_a_batch_works_with_the_kind(sketches, tmp_path):
    """Copies, order, sidecars, resume, a format that holds media, an export, an estimate."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("1.sketch", "2.sketch", "3.dat"):
        (mine / name).write_bytes(SKETCH)
    (mine / "4.sketch").write_bytes(b"SKETCH1 [")
    out = tmp_path / "out.tar"
    words = ("caption", mine, "-o", out, "--dedupe", "bytes", "--order", "input", *SHORT)
    code, said = run(*words, "--sidecar", ".caption", "--no-report")
    assert (code, "2 asked the same as another item" in said) == (1, True), said
    assert sorted(path.name for path in mine.glob("*.caption")) == [
        "1.caption",
        "2.caption",
        "3.caption",
    ]
    code, said = run(*words, "--sidecar", ".caption", "--resume", "--no-report")
    assert (code, "1 failed" in said) == (1, True), said
    with tarfile.open(next(out.glob("*.tar"))) as tar:
        names = tar.getnames()
    assert sum(name.endswith(".sketch") for name in names) >= 2, names
    code, said = run("export", out, "-o", tmp_path / "again.jsonl")
    assert code == 0, said
    exported = records_of(tmp_path / "again.jsonl")
    assert {own.kind for record in exported.values() for own in record.media} == {"sketch"}
    code, said = run("caption", mine, "-o", tmp_path / "e.jsonl", "--estimate", "2", *SHORT)
    assert (code, "sketch" in said) == (0, True), said
