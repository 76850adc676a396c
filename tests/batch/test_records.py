"""Outputs become records, and records survive a round trip through JSON."""

import json
from dataclasses import replace

import pytest

from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.records.making import bad_record, record_of
from mmdeploy_llm.data.records.record import FIELDS, ItemError, Record, Timings, key_of
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import PromptTooLongError
from mmdeploy_llm.values.outputs.request_output import Completions, ToolCall
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts
from mmdeploy_llm.values.text.display import seconds


def item(prompt, n=1, **values):
    params = SamplingParams(n=n)
    return Item(line=3, id="i", prompt=PromptParts(text=prompt), params=params, **values)


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
    output = fake_llm.answer(PromptParts(text="cat"), 3)
    fault = {"finish_reason": "error", "error_code": 500, "error_msg": "no memory", "text": ""}
    samples = [output.outputs[0], replace(output.outputs[1], **fault), output.outputs[2]]
    message = "1 of 3 completions failed, first completion 1: no memory"
    failed = replace(output, outputs=Completions(samples), error_code=500, error_msg=message)
    record = record_of(item("cat", n=3), failed)
    assert record.error == ItemError(code=500, kind="EngineError", message=message)
    assert (record.finish_reason, record.text) == ("error", "a caption of cat")
    lost = {"code": 500, "class": "EngineError", "message": "no memory"}
    assert [sample["error"] for sample in record.outputs] == [None, lost, None]
    assert [sample["text"] for sample in record.outputs] == ["a caption of cat", "", record.text]


def test_tool_calls(fake_llm):
    """Tool calls have the form of OpenAI's API; a record without calls lacks the key."""
    made = ToolCall(id="c", name="f", arguments='{"x": 1}')
    output = fake_llm.answer(PromptParts(text="cat"), 2)
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
    wanted = ItemError(code=400, kind="PromptTooLongError", message="cannot read bad")
    assert record.error == wanted
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
        Record(id=7, line=7, error=ItemError(code=413, kind="MediaError", message="too large")),
        Record(id=name, media=(Media(kind="video", name=name),), outputs=({"index": 0},)),
    ):
        line = record.to_json()
        assert "\n" not in line
        assert Record.from_json(line.encode()) == record


def test_a_line_has_the_fields_that_are_declared_in_their_order():
    """Some are always there, others only where they say something."""
    always = [name for name, own in FIELDS.items() if own.kept == "always"]
    assert list(json.loads(Record(id="a").to_json())) == always
    filled = {**dict.fromkeys(FIELDS, "x"), "timings": Timings(), "media": (), "error": None}
    filled = {name: value for name, value in filled.items() if name != "exact"}
    found = list(json.loads(Record(**filled).to_json()))
    assert found == [name for name in FIELDS if name not in ("media", "exact")]


def test_an_item_has_failed_if_and_only_if_it_has_an_error():
    error = ItemError(code=500, kind="EngineError", message="x")
    assert Record(id="a", error=error).outcome == "failed"
    with pytest.raises(ValueError, match="has an error"):
        Record(id="a", outcome="failed")


LINE = Record(id="a", line=1).to_values()
ERROR = {"code": 400, "class": "MediaError", "message": "x"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"id": True}, "no id or line"),
        ({"id": 3.5}, "no id or line"),
        ({"odd": 1}, "odd"),
        ({"error_code": 200}, "error_code"),
        ({"line": True}, "line is not an integer"),
        ({"num_output_tokens": "many"}, "num_output_tokens is not an integer"),
        ({"num_tokens_by_kind": [1]}, "num_tokens_by_kind"),
        ({"timings": 3}, "mapping"),
        ({"media": [1]}, "mapping"),
        ({"outcome": "odd"}, "outcome is 'odd'"),
        ({"outcome": "failed"}, "contradicts"),
        ({"error": ERROR}, "contradicts"),
        *(
            ({"outcome": "failed", "error": {**ERROR, **wrong}}, "its error")
            for wrong in ({"code": "400"}, {"code": True}, {"class": None}, {"more": 1})
        ),
        ({"outcome": "failed", "error": {"code": 400, "message": "x"}}, "its error"),
        ({"outcome": "failed", "error": "x"}, "its error"),
    ],
)
def test_other_values_are_refused(values, words):
    Record.from_values(LINE)
    with pytest.raises(ValueError, match=words):
        Record.from_json(json.dumps({**LINE, **values}))


@pytest.mark.parametrize("line", ["", "[]", "{}", "{", "3", '{"id": "a", "prompt": "x"}'])
def test_other_json_is_refused(line):
    with pytest.raises(ValueError):
        Record.from_json(line)


@pytest.mark.parametrize("name", [name for name in LINE if name != "line"])
def test_a_line_without_a_field_that_every_record_has_is_refused(name):
    with pytest.raises(ValueError, match=f"it has no {name}"):
        Record.from_values({own: value for own, value in LINE.items() if own != name})


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


def test_a_record_says_what_a_model_did_not_get_of_its_media():
    record = Record(id="a.ts", path="a.ts", media_notes=("the first 1.50 s cannot be seen",))
    assert json.loads(record.to_json())["media_notes"] == ["the first 1.50 s cannot be seen"]
    assert [*Record.from_json(record.to_json()).media_notes] == [*record.media_notes]
    assert "media_notes" not in json.loads(Record(id="a", path="a").to_json())
