"""Answers of a schema from end to end, with the bundled model: objects in Python, columns of a
batch, and what is cut off."""

import json
import shutil
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, field_validator

from mmdeploy_llm import LLM, ConfigError, ItemError, SamplingParams

IMAGES = Path(__file__).parents[2] / "examples" / "images"
GREEDY = SamplingParams(temperature=0, max_tokens=40)
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


class Shape(BaseModel):
    color: Literal["red", "blue", "pink", "green"]
    size: Literal["large", "small"]


class Never(BaseModel):
    color: Literal["red", "blue"]

    @field_validator("color")
    @classmethod
    def _no(cls, value):
        raise ValueError("never right")


@pytest.fixture(scope="module")
def llm():
    with LLM("shapes-vl", quiet=True, use_warmup=False, num_threads=1) as opened:
        yield opened


def about(name, question="Which color?"):
    content = [{"type": "image", "image": str(IMAGES / name)}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], **PLAIN}


@pytest.mark.full
def test_objects_or_what_went_wrong(llm):
    prompts = [about("picture-1.png"), about("truncated-on-purpose.jpg"), about("picture-2.jpg")]
    first, bad, last = llm.extract(prompts, Shape, GREEDY, use_tqdm=False)
    assert isinstance(first, Shape)
    assert isinstance(last, Shape)
    assert isinstance(bad, ItemError)
    assert bad.code == 400
    closed = {**Shape.model_json_schema(), "additionalProperties": False}
    (value,) = llm.extract(prompts[0], closed, GREEDY, use_tqdm=False)
    assert value == first.model_dump()
    (cut,) = llm.extract(prompts[0], Shape, GREEDY.replace(max_tokens=3), use_tqdm=False)
    assert cut.code == 422
    assert "cut off" in cut.message
    (wrong,) = llm.extract(prompts[0], Never, GREEDY, use_tqdm=False, retries=1)
    assert wrong.code == 422
    assert "also after 1 retries: color: Value error, never right" in wrong.message
    conversation = prompts[0]["messages"]
    (thought,) = llm.extract(conversation, Shape, GREEDY, use_tqdm=False)
    assert isinstance(thought, (Shape, ItemError))
    assert llm.extract([], Shape) == []
    with pytest.raises(ConfigError, match="needs a schema"):
        llm.extract(prompts, None)


@pytest.mark.full
def test_a_batch_has_the_fields_as_answers(llm, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("picture-1.png", "picture-2.jpg"):
        shutil.copy(IMAGES / name, folder)
    options = {"schema": Shape, "use_tqdm": False, **PLAIN, "sampling_params": GREEDY}
    summary = llm.run_batch(folder, tmp_path / "a.jsonl", **options)
    for record in summary.records():
        assert record.answers == json.loads(record.text)
        assert set(record.answers) == {"color", "size"}
    ask = {"first": "Which color?", "second": "Which size?"}
    summary = llm.run_batch(folder, tmp_path / "b.jsonl", ask=ask, **options)
    for record in summary.records():
        assert {name: set(own) for name, own in record.answers.items()} == {
            "first": {"color", "size"},
            "second": {"color", "size"},
        }


@pytest.mark.parametrize("name", ["schema", "validate"])
def test_json_that_is_cut_off_is_truncated_and_no_column(llm, tmp_path, name):
    lines = [{"id": "a", **about("picture-1.png")}]
    out = tmp_path / "out.jsonl"
    short = GREEDY.replace(max_tokens=1)
    options = {name: Shape, "sampling_params": short, "use_tqdm": False}
    summary = llm.run_batch(lines, out, **options)
    (record,) = summary.records()
    assert (record.outcome, record.outcome_reason) == ("truncated", "max_tokens was reached")
    assert record.text
    assert not record.answers
    assert (summary.failures, summary.lacks) == (
        {},
        {"truncated: max_tokens was reached": 1},
    )
    assert not summary.run.asked_again
