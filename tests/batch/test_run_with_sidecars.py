"""A run with sidecars: as items finish, when it is resumed, from files, corpora and programs."""

import json

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.options import option_settings
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.errors import ConfigError


@pytest.fixture
def do(fake_llm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(given, mode="new", output="out.jsonl", **arguments):
        options = option_settings({"sidecar": ".txt", **arguments})
        job = plan_batch(given, output, BatchSettings(mode=mode, **options))
        return run_batch(job, lambda: fake_llm)

    return run


def texts(folder, suffix=".txt"):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob(f"*{suffix}"))}


def test_each_picture_has_its_text(do, pictures):
    (pictures / "notes.txt").unlink()
    summary = do("pictures", trigger="ohwx")
    assert texts(pictures) == {
        "1.txt": "ohwx, a caption of 1.png\n",
        "2.txt": "ohwx, a caption of 2.png\n",
        "10.txt": "ohwx, a caption of 10.png\n",
        "sub/3.txt": "ohwx, a caption of 3.PNG\n",
    }
    assert "sidecars: 4 .txt written" in summary.notes


@pytest.mark.full
def test_what_was_interrupted_is_made_up_for(do, pictures, tmp_path):
    (pictures / "4.stop.png").write_bytes((pictures / "1.png").read_bytes())
    do("pictures")
    (pictures / "4.stop.png").unlink()
    (pictures / "1.txt").unlink(missing_ok=True)
    (pictures / "2.txt").write_text("edited\n")
    summary = do("pictures", "resume", on_existing="overwrite")
    assert {*texts(pictures)} == {"1.txt", "2.txt", "10.txt", "sub/3.txt", "notes.txt"}
    before = texts(pictures)
    (pictures / "10.txt").unlink()
    summary = do("pictures", "resume", on_existing="overwrite")
    assert texts(pictures) == before
    assert "sidecars: 1 .txt written" in summary.notes


def test_a_run_that_is_done_fills_in_too_from_anywhere(do, pictures, tmp_path, monkeypatch):
    for name in ("bad.jpg", "notes.txt"):
        (pictures / name).unlink()
    do("pictures", sidecar=None)
    assert texts(pictures) == {}
    monkeypatch.chdir(pictures)
    summary = do(str(pictures), "resume", output=str(tmp_path / "out.jsonl"))
    assert len(texts(pictures)) == 4
    assert summary.run.num_items == 0


def test_a_link_that_was_named_leads_to_the_pictures(do, pictures, tmp_path):
    (tmp_path / "link").symlink_to(pictures)
    do("link")
    assert "1.txt" in texts(pictures)


def test_pictures_of_a_corpus(do, pictures, tmp_path):
    rows = [
        {"id": 1, "image": "pictures/1.png", "title": "one"},
        {"id": 2, "image": str(tmp_path.parent / "outside.png"), "title": "two"},
        {"id": 3, "image": "pictures/sub/3.PNG", "title": "three"},
    ]
    (tmp_path.parent / "outside.png").write_bytes((pictures / "1.png").read_bytes())
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = {"image_column": "image", "columns": ["title"], "sidecar_template": "{title}: {text}"}
    summary = do("list.jsonl", **words)
    assert texts(pictures)["1.txt"] == "one: a caption of 1.png\n"
    assert texts(pictures)["sub/3.txt"] == "three: a caption of 3.PNG\n"
    assert not (tmp_path.parent / "outside.txt").exists()
    note = "  1 not written: it is not beneath the folder of the input (2)"
    assert note in summary.notes


def test_pictures_that_a_program_names(do, pictures):
    content = [{"type": "image", "image": str(pictures / "1.png")}]
    rows = [
        {"messages": [{"role": "user", "content": content}]},
        {"prompt": "a text about nothing"},
    ]
    summary = do(rows)
    assert "1.txt" in texts(pictures)
    assert any("it has no picture" in note for note in summary.notes)


def test_wrong_options_are_told_before_anything_is_loaded(do, pictures):
    for wrong in ({"sidecar": ".png"}, {"on_existing": "maybe"}, {"sidecar_template": "{x!r}"}):
        with pytest.raises(ConfigError):
            do("pictures", **wrong)
    with pytest.raises(ConfigError, match="did you mean 'sidecar_prefix'"):
        do("pictures", sidecar_prefi="x")
    assert {*texts(pictures)} == {"notes.txt"}


@pytest.mark.full
def test_a_text_that_is_there_is_part_of_the_question(do, pictures, fake_llm):
    for name, text in (("1.txt", "a {draft}\n"), ("2.txt", " "), ("10.txt", "old")):
        (pictures / name).write_text(text)
    (pictures / "bad.jpg").unlink()
    (pictures / "notes.txt").unlink()
    words = {"on_existing": "overwrite"}
    asked = "Improve this caption: {sidecar}. {{sidecar}} {1}"

    def run(mode="new"):
        options = option_settings({"sidecar": ".txt", **words})
        settings = BatchSettings(mode=mode, question=asked, **options)
        return run_batch(plan_batch("pictures", "out.jsonl", settings), lambda: fake_llm)

    summary = run()
    found = {own.messages[0].text for own in fake_llm.prompts}
    end = " {{sidecar}} {1}"
    assert found == {
        f"Improve this caption: a {{draft}}.{end}",
        f"Improve this caption: old.{end}",
    }
    assert texts(pictures)["1.txt"] == "a caption of 1.png\n"
    assert summary.failures == {"400 RequestError": 2}
    messages = {own.path: own.error.message for own in summary.records() if own.error}
    assert messages == {
        "pictures/2.png": "its sidecar '2.txt' is empty",
        "pictures/sub/3.PNG": "its sidecar '3.txt' is missing",
    }
    (pictures / "2.txt").write_text("now there is one")
    fake_llm.prompts.clear()
    assert run("resume").num_failed == 1
    assert len(fake_llm.prompts) == 1  # what was improved is not improved again


def test_another_column_in_a_question_about_files_is_an_error(do, pictures):
    with pytest.raises(ConfigError, match=r"no column fills \{title\}"):
        plan_batch("pictures", "out.jsonl", BatchSettings(question="{sidecar} {title}"))


def test_a_name_that_no_file_fills_is_an_error_before_anything_is_written(do, pictures, tmp_path):
    with pytest.raises(ConfigError, match=r"no value fills \{artist\}.*\{text\}"):
        do("pictures", sidecar_template="{text} by {artist}")
    assert not (tmp_path / "out.jsonl").exists()
    do("pictures", sidecar_template="{trigger} {file} {stem} {folder} {text}")


def test_the_list_of_what_is_skipped_is_apart_from_the_output(do, pictures, tmp_path):
    for name in ("out.jsonl", "out.jsonl.state.json"):
        with pytest.raises(ConfigError, match=r"belongs to the output.*--skipped"):
            do("pictures", skipped=name)
        assert not (tmp_path / name).exists()
