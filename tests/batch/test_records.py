"""Outputs become records, and records survive a round trip through JSON."""

import json
from dataclasses import replace

import pytest

from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.records.making import bad_record, record_of
from mmdeploy_llm.data.records.record import ItemError, Record, Timings, key_of
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import PromptTooLongError
from mmdeploy_llm.values.outputs.request_output import Completions, ToolCall
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.display import seconds


def item(prompt, n=1, **values):
    params = SamplingParams(n=n)
    return Item(line=3, id="i", prompt={"prompt": prompt}, params=params, **values)


def answer(fake_llm, prompt, n=1, error=None, **values):
    asked = item(prompt, n, **values)
    return record_of(asked, fake_llm.answer(asked.prompt, n), error)


def test_a_good_output(fake_llm):
    record = answer(fake_llm, "cat", media=(Media(kind="image", name="/x/cat.png"),))
    assert record.is_ok
    assert (record.id, record.line, record.key) == ("i", 3, "i")
    assert (record.text, record.reasoning) == ("a caption of cat", "I look.")
    assert (record.num_image_tokens, record.num_prompt_tokens) == (16, 20)
    assert (record.num_output_tokens, record.num_cached_tokens) == (3, 4)
    assert record.timings == Timings(preprocess=0.01, first_token=0.25, total=1.2346)
    assert record.finish_reason == "stop"
    assert record.media == (Media(kind="image", name="/x/cat.png"),)
    assert record.outputs == ()


def test_several_samples_are_listed_in_their_order(fake_llm):
    record = answer(fake_llm, "cat", n=3)
    assert [sample["index"] for sample in record.outputs] == [0, 1, 2]
    assert record.num_output_tokens == 9
    assert record.outputs[0]["token_ids"] == [5, 6, 7]


def test_one_failed_sample_makes_the_item_failed_and_loses_no_other(fake_llm):
    output = fake_llm.answer({"prompt": "cat"}, 3)
    fault = {"finish_reason": "error", "error_code": 500, "error_msg": "no memory", "text": ""}
    samples = [output.outputs[0], replace(output.outputs[1], **fault), output.outputs[2]]
    message = "1 of 3 completions failed, first completion 1: no memory"
    failed = replace(output, outputs=Completions(samples), error_code=500, error_msg=message)
    record = record_of(item("cat", n=3), failed)
    assert (record.error_code, record.error_msg) == (500, message)
    assert (record.finish_reason, record.text) == ("error", "a caption of cat")
    assert [sample["error_code"] for sample in record.outputs] == [200, 500, 200]
    assert [sample["error_msg"] for sample in record.outputs] == [None, "no memory", None]
    assert [sample["text"] for sample in record.outputs] == ["a caption of cat", "", record.text]


def test_tool_calls(fake_llm):
    """Tool calls have the form of OpenAI's API; a record without calls lacks the key."""
    made = ToolCall(id="c", name="f", arguments='{"x": 1}')
    output = fake_llm.answer({"prompt": "cat"}, 2)
    own = replace(output.outputs[0], tool_calls=(made,), finish_reason="tool_calls")
    output = replace(output, outputs=Completions([own, output.outputs[1]]))
    record = record_of(item("cat", n=2), output)
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert record.tool_calls == ({"id": "c", "type": "function", "function": function},)
    assert record.finish_reason == "tool_calls"
    assert [sample.get("tool_calls") for sample in record.outputs] == [record.tool_calls, None]
    again = Record.from_json(record.to_json())
    assert again.tool_calls == record.tool_calls
    assert "tool_calls" not in json.loads(answer(fake_llm, "cat").to_json())


def test_a_failed_output_has_its_code_and_class(fake_llm):
    record = answer(fake_llm, "bad", error=PromptTooLongError("cannot read bad"))
    assert not record.is_ok
    assert record.error == ItemError(code=400, message="cannot read bad")
    assert (record.error_code, record.error_msg) == (400, "cannot read bad")
    assert record.failure == "400 PromptTooLongError"
    assert answer(fake_llm, "bad").failure == "400 RequestError"
    assert record.timings == Timings()


def test_a_line_that_cannot_be_used_is_known_by_its_number():
    record = bad_record(BadItem(line=7, message="no JSON"))
    assert record.id is None
    assert record.key == key_of(None, 7) != key_of(7, 7)
    assert Record.from_json(record.to_json()) == record


@pytest.mark.parametrize("name", ["a.png", "ünï — 文.png", 'quote".png', "bytes\udcff.png"])
def test_json_keeps_everything(name):
    for record in (
        Record(id=name, path=name, text="two\nlines </script>", timings=Timings(total=1.5)),
        Record(id=7, line=7, error_code=413, error=ItemError(code=413, message="too large")),
        Record(id=name, media=(Media(kind="video", name=name),), outputs=({"index": 0},)),
    ):
        line = record.to_json()
        assert "\n" not in line
        assert Record.from_json(line.encode()) == record


def test_json_fields_of_a_caption_have_those_of_the_first_version():
    fields = list(json.loads(Record(id="a", path="a").to_json()))
    first = "path text reasoning finish_reason num_image_tokens num_prompt_tokens"
    first += " num_output_tokens num_cached_tokens timings error"
    assert [name for name in fields if name in first.split()] == first.split()
    assert set(fields) - set(first.split()) == {
        "id",
        "error_code",
        "error_msg",
        "error_class",
        "num_video_tokens",
        "outcome",
    }


def test_records_of_the_first_version_are_read():
    old = '{"path": "a.png", "text": "", "error": {"code": 415, "message": "no image"}}'
    record = Record.from_json(old)
    assert (record.id, record.error_code, record.error_msg) == ("a.png", 415, "no image")
    assert not record.is_ok
    assert record.outcome == "failed"


@pytest.mark.parametrize(
    "line",
    [
        *("", "[]", "{}", "{", "3"),
        '{"path": 3.5}',
        '{"id": true}',
        '{"id": "a", "odd": 1}',
        '{"id": "a", "num_output_tokens": "many"}',
        '{"id": "a", "timings": 3}',
        '{"id": "a", "media": [1]}',
        '{"id": "a", "text": "", "error": null, "outcome": "odd"}',
    ],
)
def test_other_json_is_refused(line):
    with pytest.raises(ValueError):
        Record.from_json(line)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "not reached"), (0.0345, "34 ms"), (1.26, "1.3 s"), (65, "1 min 05 s")],
)
def test_durations_in_words(value, words):
    assert seconds(value) == words


def test_a_record_says_what_of_its_videos_was_used():
    """Frames and seconds stand in the record of an item with videos, and in no other."""
    record = Record(id="a.mp4", path="a.mp4", num_video_frames=12, video_seconds=59.5)
    values = json.loads(record.to_json())
    assert (values["num_video_frames"], values["video_seconds"]) == (12, 59.5)
    assert Record.from_json(record.to_json()) == record
    assert "video_seconds" not in json.loads(Record(id="a", path="a").to_json())
