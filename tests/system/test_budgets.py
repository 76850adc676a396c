"""image_tokens and video_tokens of an engine, of a prompt, and of the program."""

import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.program import app
from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.media.budgets.photo import cost_of_a_photo

PARAMS = SamplingParams(temperature=0, max_tokens=4)


def asked(kind, source, **more):
    part = {"type": kind, kind: source}
    content = [part, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.mark.full
def test_budgets_of_an_engine_and_of_a_prompt():
    """A budget holds for what is counted and what is computed; a prompt may lower it only, and its
    error is its own."""
    picture = Image.new("RGB", (800, 600), "red")
    prompts = [
        asked("image", picture),
        asked("image", picture, mm_processor_kwargs={"image_tokens": 5}),
        asked("image", picture, mm_processor_kwargs={"image_tokens": 21}),
        asked("video", "examples/images/clip-1.mp4"),
        asked("video", "examples/images/clip-1.mp4", mm_processor_kwargs={"video_tokens": 20}),
    ]
    with LLM("shapes-vl", image_tokens=20, video_tokens=200, quiet=True) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        counts = [llm.count_tokens(prompt) for prompt in prompts[:2]]
    used = [output.num_input_image_tokens for output in outputs[:2]]
    assert used == [count.num_input_image_tokens for count in counts]
    assert used[1] <= 5 < used[0] <= 20
    assert "above the engine's 20; raise it in LLM(image_tokens=...)" in outputs[2].error_msg
    whole, part = outputs[3:]
    assert part.num_input_video_tokens <= 20 < whole.num_input_video_tokens <= 200
    assert 0 < part.num_input_video_frames < whole.num_input_video_frames
    assert 3 < part.input_video_seconds <= whole.input_video_seconds < 4


@pytest.mark.full
def test_the_program_says_what_a_photo_costs(tmp_path):
    """`caption` and `count` take the same budget, and the records and the summary say what of a
    video was used."""
    sources = ["examples/images/picture-1.png", "examples/images/clip-1.mp4"]
    words = ["-o", str(tmp_path / "out.jsonl"), "--no-report", "--max-tokens", "4"]
    budget = ["--image-tokens", "6", "--video-tokens", "100"]
    done = CliRunner().invoke(app, ["caption", *sources, *words, *budget])
    found = re.search(
        r"12 MP photos become (\d+)x(\d+) -> (\d) tokens \(--image-tokens 6\)", done.output
    )
    width, height, tokens = map(int, found.groups())
    assert 0 < tokens <= 6
    assert width * height < 100_000
    assert "videos: " in done.output
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    by_path = {record["path"].rpartition("/")[2]: record for record in records}
    assert 0 < by_path["picture-1.png"]["num_image_tokens"] <= 6
    assert 0 < by_path["clip-1.mp4"]["num_video_tokens"] <= 100
    assert by_path["clip-1.mp4"]["num_video_frames"] > 1
    counted = CliRunner().invoke(app, ["count", sources[0], "-p", "x", "--json", *budget])
    found = json.loads(counted.output.splitlines()[0])["num_input_image_tokens"]
    assert found == by_path["picture-1.png"]["num_image_tokens"]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("wrong", ["0", "-5", "1.5", "many", ""])
def test_a_wrong_budget_is_an_error_before_anything_is_loaded(wrong, tmp_path):
    """The message names the option and what it may be."""
    words = ["caption", "examples/images", "-o", str(tmp_path / "o.jsonl"), "--image-tokens", wrong]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "--image-tokens" in done.output
    assert "whole number above 0" in " ".join(done.output.split())


def test_a_family_that_does_not_say_what_it_sees_names_no_size():
    llm = SimpleNamespace(
        count_tokens=lambda prompt: TokenCount(
            num_prompt_tokens=9, num_input_image_tokens=1234, num_input_video_tokens=0
        )
    )
    assert cost_of_a_photo(llm, 2000) == "12 MP photos -> 1,234 tokens (--image-tokens 2000)"


def test_what_a_model_did_not_get_of_a_video_is_told(tmp_path, load_file):
    """The output, the record and the summary say that a recording begins between key frames."""
    videos = load_file("media/numbered_videos.py")
    whole = videos.encoded("mpegts", "libx264", ticks=range(60), gop=40)
    (tmp_path / "cut.ts").write_bytes(videos.without_first(whole, 25, "mpegts"))
    note = "the first 1.50 s of the video cannot be seen: no frame of them can be decoded"
    with LLM("shapes-vl", quiet=True) as llm:
        (output,) = llm.generate(asked("video", tmp_path / "cut.ts"), PARAMS, use_tqdm=False)
    assert output.media_notes == (note,)
    words = ["-o", str(tmp_path / "out.jsonl"), "--no-report", "--max-tokens", "4"]
    done = CliRunner().invoke(app, ["caption", str(tmp_path / "cut.ts"), *words])
    assert "1 record says what a model did not get of its text or media: media_notes" in done.output
    [record] = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert record["media_notes"] == [note]


def test_how_numbers_without_a_white_were_shown_is_told(tmp_path, load_file):
    """It is told of files, of images that the caller has opened, and of pages that are turned."""
    files = load_file("media/tiff_files.py")
    blob = files.tiff(np.arange(-512, 512, dtype=np.int16).reshape(32, 32))
    (tmp_path / "heights.tif").write_bytes(blob)
    note = (
        "the image's numbers from -512 to 511 were shown from black to white, as it names no white"
    )
    with LLM("shapes-vl", quiet=True) as llm:
        for kind, source in (
            ("image", tmp_path / "heights.tif"),
            ("image", Image.open(io.BytesIO(blob))),
            ("tiff", tmp_path / "heights.tif"),
        ):
            prompt = asked(kind, source)
            if kind == "tiff":
                prompt["messages"][0]["content"][0]["turn"] = 90
            (output,) = llm.generate(prompt, PARAMS, use_tqdm=False)
            assert output.media_notes == (note,), kind
