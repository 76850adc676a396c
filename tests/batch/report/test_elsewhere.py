"""Pictures of a report are found from another working folder than that of the run."""

import shutil

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.batch.report.previews import media_of
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.data.records.identity import digest_of, file_state
from mmdeploy_llm.data.records.record import Record


def run(*words):
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code in (0, 4), done.output


@pytest.mark.full
def test_pictures_are_found_by_the_root_and_the_id(tmp_path, monkeypatch, png):
    (tmp_path / "pics").mkdir()
    for name in ("1.png", "2.png"):
        (tmp_path / "pics" / name).write_bytes(png)
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    out = ("-o", str(tmp_path / "out.jsonl"))
    run("caption", "pics", *out, "--limit", "1", "--no-report")
    monkeypatch.chdir(tmp_path / "else")
    run("caption", str(tmp_path / "pics"), *out, "--resume")
    run("report", out[1], "-o", "all.html")
    for page in (tmp_path / "out.html", tmp_path / "else/all.html"):
        assert page.read_text().count("<article") == 2
        assert page.read_text().count("data:image/jpeg") == 2


def test_another_file_of_the_same_name_is_not_shown(tmp_path, monkeypatch, png):
    for name in ("a", "b"):
        (tmp_path / name / "pics").mkdir(parents=True)
    own = tmp_path / "a/pics/1.png"
    own.write_bytes(png)
    (tmp_path / "b/pics/1.png").write_bytes(png + b"x")
    record = Record(
        id="1.png", path="pics/1.png", text="x", item_digest=digest_of(file_state(str(own)))
    )
    monkeypatch.chdir(tmp_path / "b")
    assert media_of(record, [str(tmp_path / "c"), str(own.parent)])[0].name == str(own)
    assert media_of(record)[0].name == str(tmp_path / "b/pics/1.png")
    shutil.rmtree(tmp_path / "a")  # then what the path names here
    assert media_of(record, [str(own.parent)])[0].name == str(tmp_path / "b/pics/1.png")
