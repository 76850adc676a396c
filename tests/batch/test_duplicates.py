"""Items that ask the same of the same picture are answered once and recorded for all."""

import io
import json
from dataclasses import replace

import pytest
from PIL import Image

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.files.options import FindingOptions
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.media.loading.reader import open_reader
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.prompt import PromptParts


@pytest.fixture
def folder(tmp_path):
    """Three pictures: one of them in four files of two formats, one broken in two files."""
    folder = tmp_path / "photos"
    folder.mkdir()
    red, blue = (Image.new("RGB", (20, 10), colour) for colour in ("red", "blue"))
    for name in ("a.png", "copy of a.png", "later/a.png"):
        (folder / name).parent.mkdir(exist_ok=True)
        red.save(folder / name)
    red.save(folder / "a.bmp")
    red.transpose(Image.Transpose.ROTATE_90).save(folder / "turned.png")
    blue.save(folder / "b.png")
    for name in ("bad1.jpg", "bad2.jpg"):
        (folder / name).write_bytes(b"\xff\xd8\xff no picture")
    return folder


@pytest.fixture
def run(fake_llm, tmp_path):
    def run(given, dedupe="bytes", mode="new", out=tmp_path / "out.jsonl", model="m"):
        settings = BatchSettings(
            mode=mode,
            finding=FindingOptions(dedupe=dedupe),
            describe_engine=lambda: Configuration(model=model, values={"model": model}),
        )
        settings = settings.for_model(lambda: open_reader(EngineConfig(model="shapes-vl")))
        before = fake_llm.num_taken
        summary = run_batch(plan_batch(given, out, settings), lambda: fake_llm)
        return summary, fake_llm.num_taken - before

    return run


def records_of(path):
    return {record["id"]: record for record in map(json.loads, path.read_text().splitlines())}


def test_files_of_the_same_bytes_are_asked_about_once(run, folder, tmp_path):
    summary, num_asked = run(str(folder))
    assert num_asked == 5
    records = records_of(tmp_path / "out.jsonl")
    assert len(records) == 8
    first = records["a.png"]
    assert first.get("same_as") is None
    for name in ("copy of a.png", "later/a.png"):
        copy = records[name]
        assert (copy["same_as"], copy["text"]) == ("a.png", first["text"])
        assert copy["path"].endswith(name)
        assert (copy["num_prompt_tokens"], copy["timings"]["total"]) == (0, None)
        assert copy["item_digest"] != first["item_digest"] or name == "later/a.png"
    assert (summary.run.num_done, summary.run.num_failed, summary.run.num_same) == (6, 2, 3)
    assert summary.num_left == 0
    assert "3 asked the same as another item: answered once" in summary.notes


def test_an_error_names_its_own_file(run, folder, tmp_path):
    run(str(folder))
    records = records_of(tmp_path / "out.jsonl")
    for name in ("bad1.jpg", "bad2.jpg"):
        assert records[name]["error"]["message"] == f"cannot read {folder / name}"


def test_images_of_the_same_pixels_are_asked_about_once(run, folder, tmp_path):
    assert run(str(folder), dedupe="pixels")[1] == 4
    records = records_of(tmp_path / "out.jsonl")
    assert records["a.bmp"]["text"] == records["a.png"]["text"]
    assert records["turned.png"].get("same_as") is None


@pytest.mark.full
def test_a_resumed_run_knows_what_was_answered(run, folder, tmp_path):
    out = tmp_path / "out.jsonl"
    run(str(folder))
    lines = out.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["id"] == "a.png"]
    out.write_text("".join(kept))
    summary, num_asked = run(str(folder), mode="resume")
    assert (num_asked, summary.run.num_same) == (4, 3)
    assert len(records_of(out)) == 8
    (folder / "new.png").write_bytes((folder / "later/a.png").read_bytes())
    # The failed ones are tried again, once for both.
    assert run(str(folder), mode="resume")[1] == 1
    assert records_of(out)["new.png"]["same_as"] == "a.png"


def test_without_the_option_each_is_asked(run, folder):
    summary, num_asked = run(str(folder), dedupe=None)
    assert (num_asked, summary.run.num_same) == (8, 0)


def test_rows_that_ask_something_else_are_not_the_same(
    run, folder, tmp_path, fake_llm, monkeypatch
):
    answer = type(fake_llm).answer
    image = str(folder / "a.png")
    url = "https://example.org/a.png"

    def row(name, text, media, **more):
        part = {"type": "image", "image": media}
        content = [part, {"type": "text", "text": text}]
        return {"id": name, "messages": [{"role": "user", "content": content}], **more}

    data = (folder / "a.png").read_bytes()
    rows = [
        row("1", "What?", image),
        row("2", "What?", str(folder / "copy of a.png")),
        row("3", "Which?", image),
        row("4", "What?", image, sampling_params={"max_tokens": 5}),
        row("5", "What?", url),
        row("6", "What?", url),
        row("7", "What?", str(folder / "missing.png")),
        row("8", "What?", str(folder / "missing.png")),
        row("9", "What?", Image.open(io.BytesIO(data))),
        row("10", "What?", Image.open(io.BytesIO(data))),
    ]
    monkeypatch.setattr(
        type(fake_llm), "answer", lambda own, _, n: answer(own, PromptParts(text="x"), n)
    )
    assert run(rows)[1] == len(rows) - 1
    records = records_of(tmp_path / "out.jsonl")
    assert [name for name, record in records.items() if record.get("same_as")] == ["2"]


@pytest.mark.full
def test_parts_keep_whose_answer_it_is(run, folder, tmp_path):
    pytest.importorskip("pyarrow")
    from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs

    run(str(folder), out=tmp_path / "out.parquet")
    found = {
        record.id: record for record in MergedOutputs([str(tmp_path / "out.parquet")]).records()
    }
    assert found["copy of a.png"].same_as == "a.png"
    assert found["a.png"].content == found["copy of a.png"].content != ""
    assert run(str(folder), out=tmp_path / "out.parquet", mode="resume")[1] == 1


def test_answers_of_another_configuration_are_not_used(run, folder, tmp_path, fake_llm):
    run(str(folder))
    (folder / "new.png").write_bytes((folder / "a.png").read_bytes())
    settings = BatchSettings(
        mode="resume",
        is_any_config_kept=True,
        finding=FindingOptions(dedupe="bytes"),
        describe_engine=lambda: Configuration(model="other", values={"model": "other"}),
    )
    settings = settings.for_model(lambda: open_reader(EngineConfig(model="shapes-vl")))
    run_batch(plan_batch(str(folder), tmp_path / "out.jsonl", settings), lambda: fake_llm)
    assert records_of(tmp_path / "out.jsonl")["new.png"].get("same_as") is None


def test_an_unknown_choice_is_refused():
    with pytest.raises(ConfigError, match="bytes, pixels"):
        replace(FindingOptions(), dedupe="faces")
