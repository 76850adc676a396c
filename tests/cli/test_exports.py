"""`mmdeploy-llm export`: what it writes and prints, and wrong options."""

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.cli.commands.exports import EXPORT_EPILOG
from mmdeploy_llm.data.outputs.exports.formats import FORMATS
from mmdeploy_llm.data.outputs.own_formats import FORMATS as OUTPUTS
from mmdeploy_llm.data.records.record import ItemError, Record

ERROR = ItemError(code=400, kind="MediaError", message="no")


@pytest.fixture
def captions(tmp_path, monkeypatch):
    """An output of three items: a caption, an empty one, a failure."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.png").write_bytes(b"\x89PNG\r\n\x1a\n and more")
    rows = [
        Record(id="a.png", path="p/a.png", text="A cat."),
        Record(id="b.png", path="p/b.png", outcome="empty"),
        Record(id="c.png", path="p/c.png", error=ERROR),
    ]
    path = tmp_path / "captions.jsonl"
    path.write_text("".join(row.to_json() + "\n" for row in rows))
    return path


def run(*words):
    done = CliRunner().invoke(app, ["export", *words])
    return done.exit_code, done.output.splitlines()


def test_every_format_is_named_in_the_help():
    for form in (*OUTPUTS, *FORMATS):
        assert f"\n  {form.name} " in EXPORT_EPILOG


def test_records_are_counted(captions, tmp_path):
    code, lines = run("captions.jsonl", "-o", "good.csv", "--outcome", "ok,failed")
    assert code == 0
    assert lines == [
        "3 records in, 2 written, 1 left out",
        "  1 left out: its outcome is empty",
        "csv: good.csv",
    ]
    assert len((tmp_path / "good.csv").read_text().splitlines()) == 3


@pytest.mark.full
def test_a_training_set_in_one_command(captions, tmp_path):
    words = ("captions.jsonl", "-o", "lora", "--format", "kohya", "--trigger", "ohwx")
    code, lines = run(*words, "--trigger", "cat", "--sidecar", ".caption", "--repeats", "3")
    assert code == 0
    assert lines[0] == "3 records in, 1 written, 2 left out"
    assert (tmp_path / "lora/3_ohwx cat/a.caption").read_text() == "ohwx, cat, A cat.\n"
    code, _ = run("captions.jsonl", "-o", "p", "--format", "sidecar", "--sidecar-prefix", "> ")
    assert code == 0
    assert (tmp_path / "p/a.txt").read_text() == "> A cat.\n"


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "words",
    [
        ("-o", "x.xlsx"),
        ("-o", "x", "--format", "xml"),
        ("-o", "x.csv", "--outcome", "good"),
        ("-o", "x.csv", "--trigger", "y"),
        ("-o", "x.csv", "--repeats", "3"),
        ("-o", "x", "--format", "kohya", "--on-existing", "append"),
        ("-o", "x", "--format", "kohya", "--sidecar", ".png"),
        ("-o", "captions.jsonl", "--overwrite"),
        ("missing.jsonl", "-o", "x.csv"),
        ("-o", "s3://bucket/x.csv"),
        ("-o", "x.csv", "--part-items", "3"),
    ],
)
def test_wrong_options_write_nothing(captions, tmp_path, words):
    before = captions.read_bytes()
    code, lines = run("captions.jsonl", *words)
    assert code == 2, lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["captions.jsonl", "p"]
    assert captions.read_bytes() == before


def test_an_export_that_writes_nothing_does_not_end_with_0(captions, tmp_path):
    (tmp_path / "p/a.png").unlink()
    code, lines = run("captions.jsonl", "-o", "lora", "--format", "kohya", "--trigger", "ohwx")
    assert (code, lines[0]) == (1, "3 records in, 0 written, 3 left out")


@pytest.mark.full
def test_an_export_that_loses_a_record_does_not_end_with_0(captions, tmp_path):
    lost = Record(id="d.png", path="p/lost.png", text="A dog.")
    captions.write_text(captions.read_text() + lost.to_json() + "\n")
    for words in (
        ("lora", "--format", "kohya", "--trigger", "x"),
        ("if", "--format", "imagefolder"),
    ):
        code, lines = run("captions.jsonl", "-o", *words, "--outcome", "ok")
        assert (code, lines[0]) == (1, "4 records in, 1 written, 3 left out")
        assert any("--media-root FOLDER says where" in line for line in lines)
    code, lines = run("captions.jsonl", "-o", "x.csv", "--outcome", "truncated")
    assert (code, lines[0]) == (1, "4 records in, 0 written, 4 left out")
