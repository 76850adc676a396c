"""`boxes=True`: records have the boxes of their answers, and what could not be read is told."""

import csv
import json
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from mmdeploy_llm_plugins.qwen import QWEN3_VL_BOXES as QWEN3_VL

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.questions.boxed import MAX_BOXES, Boxed
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.engine.startup.media import check_boxes
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.media.boxes.reading import find_boxes
from mmdeploy_llm.testing.tiny import write_tiny
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.outputs.request_output import Completions
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

from .conftest import FakeLLM

ASKS = {"one": "first", "two": "second"}
SIZE = (2000, 1000)
CAT = '{"bbox_2d": [100, 100, 300, 500], "label": "cat"}'
CAT_BOX = {"label": "cat", "box": [200.0, 100.0, 600.0, 500.0]}


class Grounding(FakeLLM):
    """Answers with the text that the prompt is; a prompt with "two" has two pictures."""

    def answer(self, prompt, n=1):
        output = super().answer(prompt, n)
        text = prompt.text or ""
        own = [replace(sample, text=text) for sample in output.outputs]
        return replace(output, outputs=Completions(own)) if output.is_ok else output

    def find_boxes(self, prompt, text):
        if "two" in text:
            raise RequestError("boxes need a prompt with one picture and nothing else, found 2")
        return find_boxes(text, QWEN3_VL, SIZE)


def ran(tmp_path, texts, name="out.jsonl", llm=None, **settings):
    lines = [{"id": str(number), "prompt": text} for number, text in enumerate(texts)]
    job = plan_batch(lines, tmp_path / name, BatchSettings(boxes=True, **settings))
    summary = run_batch(job, lambda: llm or Grounding())
    return summary, {record.id: record for record in summary.records()}


def test_records_have_boxes_and_the_summary_counts_all(tmp_path):
    """Boxes in pixels of the picture; none, half-written ones and several pictures are counted."""
    half = '[{"bbox_2d": [1, 2, 3'
    summary, records = ran(tmp_path, [f"[{CAT}, {CAT}]", "no cat", half, "two", "bad"])
    assert records["0"].boxes == (CAT_BOX, CAT_BOX)
    assert records["0"].picture_size == SIZE
    assert records["1"].boxes == ()
    assert records["1"].picture_size == SIZE, "boxes were looked for"
    assert records["3"].picture_size == records["4"].picture_size == ()
    assert summary.notes == (
        "2 boxes in 1 answers, 2 have none",
        "1 boxes could not be read: half-written, or no area",
        "boxes of 1 answers were not read: boxes need a prompt with one picture and nothing else, "
        "found 2",
    )
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[-1])
    assert "boxes" not in line or line["boxes"]


@pytest.mark.full
def test_an_answer_of_100_000_boxes(tmp_path):
    """It is bounded and told, and takes no time."""
    begin = time.monotonic()
    summary, records = ran(tmp_path, [f"[{', '.join([CAT] * 100_000)}]"])
    assert time.monotonic() - begin < 60
    assert len(records["0"].boxes) == MAX_BOXES
    assert "99000 boxes left out: a record has 1000 of an answer" in summary.notes


def test_boxes_and_frames_through_parquet(tmp_path):
    """They are columns of their own there, and come back as they were, also to a resumed run."""
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    class Filming(Grounding):
        def answer(self, prompt, n=1):
            output = super().answer(prompt, n)
            return replace(output, num_input_video_frames=8, input_video_seconds=4.5)

    ran(tmp_path, [f"[{CAT}]"], "out.parquet", Filming())
    texts = [f"[{CAT}]", "no cat"]
    _, records = ran(tmp_path, texts, "out.parquet", Filming(), mode="resume")
    assert records["0"].boxes == (CAT_BOX,)
    assert (records["0"].num_video_frames, records["0"].video_seconds) == (8, 4.5)
    assert records["1"].picture_size == SIZE
    (first, *_) = sorted((tmp_path / "out.parquet").glob("*.parquet"))
    names = set(parquet.read_schema(first).names)
    assert {"boxes", "picture_size", "num_video_frames", "video_seconds"} <= names
    assert parquet.read_table(first).to_pylist()[0]["boxes"] == [CAT_BOX]


def test_boxes_in_a_table(tmp_path):
    """CSV has them as JSON."""
    ran(tmp_path, [f"[{CAT}]"] * 2, "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [json.loads(row["boxes"]) for row in rows] == [[CAT_BOX]] * 2
    assert [json.loads(row["picture_size"]) for row in rows] == [list(SIZE)] * 2


def test_boxes_of_several_questions(tmp_path):
    """The record has those of all, in their order."""
    job = plan_batch(
        [
            {
                "id": "a",
                "messages": [{"role": "user", "content": "x"}],
                "ask": {"one": "first", "two": "second"},
            }
        ],
        tmp_path / "out.jsonl",
        BatchSettings(boxes=True),
    )

    class Asked(Grounding):
        def answer(self, prompt, n=1):
            number = 1 + ("second" in str(prompt))
            return super().answer(PromptParts(text=f"[{', '.join([CAT] * number)}]"), n)

    summary = run_batch(job, Asked)
    record = next(iter(summary.records()))
    assert record.is_ok, record
    assert record.boxes == (CAT_BOX,) * 3


def test_another_run_without_boxes_is_not_resumed(tmp_path):
    """Records without boxes are not taken for those of a run that reads them."""
    job = plan_batch([{"id": "a", "prompt": CAT}], tmp_path / "out.jsonl", BatchSettings())
    run_batch(job, Grounding)
    with pytest.raises(ConfigError, match="boxes"):
        ran(tmp_path, ["b"], mode="resume")


def test_what_finds_no_boxes_is_an_error(tmp_path):
    """An LLM that reads none is told before the output is made."""

    class Bare:
        answer_each = FakeLLM.answer_each

    with pytest.raises(ConfigError, match="Bare reads no boxes"):
        ran(tmp_path, ["a"], llm=nullcontext(Bare()))
    assert not (tmp_path / "out.jsonl").exists()
    assert isinstance(Boxed(Grounding(), Grounding()).counts.lines(), list)


@pytest.mark.parametrize(
    "wrong",
    [
        {"boxes": 7},
        {"boxes": [CAT_BOX]},
        {"boxes": [{"label": "a", "box": [0, 0, 1]}], "picture_size": [9, 9]},
        {"boxes": [{"label": "a", "box": [0, 0, 10, 5]}], "picture_size": [9, 9]},
        {"boxes": [{"label": "a", "box": [0, 0, float("nan"), 5]}], "picture_size": [9, 9]},
        {"boxes": [{"label": 5, "box": [0, 0, 5, 5]}], "picture_size": [9, 9]},
        {"boxes": [], "picture_size": [0, 9]},
        {"picture_size": ["<svg>", 9]},
        {"picture_size": [True, 9]},
    ],
)
def test_wrong_boxes_in_an_output(wrong):
    """A record that somebody has written is refused with a reason."""
    with pytest.raises(ValueError, match=r"its (box|picture_size)"):
        Record.from_values({**Record(id="a").to_values(), **wrong})


@pytest.mark.full
def test_models_without_a_rule_are_refused_before_loading(tmp_path):
    """The model's family decides; special tokens must be kept in the text."""
    params = SamplingParams()
    write_tiny("llama", tmp_path / "words")
    with pytest.raises(ConfigError, match=r"no plugin says how .* writes boxes; those of"):
        check_boxes(EngineConfig.from_options(str(tmp_path / "words"), {}), params)
    write_tiny("qwen2_5_vl", tmp_path / "qwen")
    check_boxes(EngineConfig.from_options(str(tmp_path / "qwen"), {}), params)
    write_tiny("paddleocr_vl", tmp_path / "ocr")
    config = EngineConfig.from_options(str(tmp_path / "ocr"), {})
    with pytest.raises(ConfigError, match="skip_special_tokens"):
        check_boxes(config, params)
    check_boxes(config, SamplingParams(skip_special_tokens=False))
