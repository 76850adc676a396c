"""Outputs become records, and records survive a round trip through JSON."""

import json

import pytest

from mmdeploy_llm.batch.records import CaptionRecord, ItemError, Timings, record_of, seconds


def answer(fake_llm, path):
    prompt = {"messages": [{"content": [{"image": path}]}]}
    return record_of(path, next(fake_llm.generate_iter([prompt])))


def test_a_good_output(fake_llm):
    record = answer(fake_llm, "/x/cat.png")
    assert record.is_ok
    assert (record.text, record.reasoning) == ("a caption of cat.png", "I look.")
    assert (record.num_image_tokens, record.num_prompt_tokens) == (16, 20)
    assert (record.num_output_tokens, record.num_cached_tokens) == (3, 4)
    assert record.timings == Timings(preprocess=0.01, first_token=0.25, total=1.2346)
    assert record.finish_reason == "stop"


def test_a_failed_output(fake_llm):
    record = answer(fake_llm, "/x/bad.png")
    assert not record.is_ok
    assert record.error == ItemError(code=400, message="cannot read /x/bad.png")
    assert record.timings == Timings()


@pytest.mark.parametrize("path", ["a.png", "ünï — 文.png", 'quote".png', "bytes\udcff.png"])
def test_json_keeps_everything(fake_llm, path):
    for record in (
        CaptionRecord(path=path, text="two\nlines </script>", timings=Timings(total=1.5)),
        CaptionRecord(path=path, error=ItemError(code=413, message="too large")),
    ):
        line = record.to_json()
        assert "\n" not in line
        assert CaptionRecord.from_json(line.encode()) == record


def test_json_fields_are_those_of_the_readme():
    assert list(json.loads(CaptionRecord(path="a").to_json())) == [
        "path",
        "text",
        "reasoning",
        "finish_reason",
        "num_image_tokens",
        "num_prompt_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "timings",
        "error",
    ]


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"path": 3}', '{"path": "a", "odd": 1}', "{"])
def test_other_json_is_refused(line):
    with pytest.raises(ValueError):
        CaptionRecord.from_json(line)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "not reached"), (0.0345, "34 ms"), (1.26, "1.3 s"), (65, "1 min 05 s")],
)
def test_durations_in_words(value, words):
    assert seconds(value) == words
