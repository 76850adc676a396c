"""The program and the examples with the real bundled model, on the demo's pictures."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmdeploy_llm import cli

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "examples" / "images"
EXAMPLES = ("quickstart", "chat_with_image", "batch_captioning", "streaming")
EXAMPLES += ("caption_webdataset", "caption_dataset")
CORRUPT = "truncated-on-purpose.jpg"
MAX_PICTURE_BYTES = 500_000


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Returns the demo's result, its lines by file name, and its page."""
    folder = tmp_path_factory.mktemp("demo")
    words = ["caption", str(PICTURES), "--thinking", "--table", "--output", f"{folder}/out.jsonl"]
    result = CliRunner().invoke(cli.app, words)
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    records = {Path(line["path"]).name: line for line in lines}
    return result, records, (folder / "out.html").read_text()


def test_every_picture_has_a_caption_but_the_corrupt_one(demo):
    result, records, _ = demo
    assert result.exit_code == 1, result.output
    assert set(records) == {path.name for path in PICTURES.iterdir()}
    assert [name for name, line in records.items() if line["error"]] == [CORRUPT]
    assert records[CORRUPT]["error"]["code"] == 400
    assert "12 captioned, 1 failed" in result.stdout


def test_captions_come_with_reasoning_counts_and_times(demo):
    _, records, _ = demo
    for name, line in records.items():
        if name == CORRUPT:
            continue
        assert line["text"]
        assert line["reasoning"]
        assert "think>" not in line["text"] + line["reasoning"]
        assert line["finish_reason"] == "stop"
        kind = "video" if name.endswith(".mp4") else "image"
        assert 0 < line[f"num_{kind}_tokens"] < line["num_prompt_tokens"]
        assert line["num_output_tokens"] > 5
        assert 0 < line["timings"]["generate"] <= line["timings"]["total"]


def test_the_clips_are_understood(demo):
    _, records, _ = demo
    assert records["clip-1.mp4"]["text"] == "A large red diamond moves up."
    assert records["clip-2.mp4"]["text"] == "A large cyan diamond moves right."


def test_the_page_shows_every_picture(demo):
    _, _, page = demo
    assert page.count("<article") == 13
    # A picture for each image, four to eight frames for each clip.
    assert 10 + 2 * 4 <= page.count("data:image/jpeg;base64,") <= 10 + 2 * 8
    assert page.count('class="card failed"') == 1


def test_the_pictures_are_of_several_kinds_and_small():
    files = list(PICTURES.iterdir())
    assert {path.suffix for path in files} == {".png", ".jpg", ".webp", ".mp4"}
    assert sum(path.stat().st_size for path in files) < MAX_PICTURE_BYTES


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert len(printed.split()) > 5
    assert "Traceback" not in printed


def test_generate_and_chat_answer(monkeypatch):
    picture = str(PICTURES / "picture-2.jpg")
    words = ["generate", "Describe the image.", "--image", picture]
    answered = CliRunner().invoke(cli.app, words)
    assert answered.exit_code == 0, answered.output
    assert answered.stdout.startswith(("A ", "From left to right"))
    assert answered.stderr.startswith("I see")
    lines = f"/image {picture}\nDescribe the image.\nHow many shapes are there?\n"
    talked = CliRunner().invoke(cli.app, ["chat", "--no-thinking"], input=lines)
    assert talked.exit_code == 0, talked.output
    assert len(talked.stdout.splitlines()) == 2
