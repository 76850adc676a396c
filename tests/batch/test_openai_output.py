"""An output in OpenAI's format: what each line holds, resuming, and whose file is left alone."""

import json

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.openai.bodies import line_of
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError

CHOICE = {"index": 0, "logprobs": None, "finish_reason": "stop"}
LOGPROBS = [
    [
        {"token_id": 5, "logprob": -2.0, "rank": 3, "decoded_token": "é"},
        {"token_id": 6, "logprob": -0.1, "rank": 1, "decoded_token": "a"},
    ]
]


def record(**values):
    return Record(**{"id": "request-1", "text": "Hi.", "finish_reason": "stop", **values})


def body_of(own):
    found = line_of(own, "shapes-vl", 1711475054)
    assert list(found) == ["id", "custom_id", "response", "error"]
    assert found["id"].startswith("batch_req_")
    assert found["custom_id"] == "request-1"
    assert list(found["response"]) == ["status_code", "request_id", "body"]
    return found["response"]["body"]


def test_a_chat():
    own = record(num_prompt_tokens=24, num_output_tokens=15, num_cached_tokens=8)
    body = body_of(own)
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert (body["created"], body["model"]) == (1711475054, "shapes-vl")
    message = {"role": "assistant", "content": "Hi.", "refusal": None}
    assert body["choices"] == [{**CHOICE, "message": message}]
    assert body["usage"] == {
        "prompt_tokens": 24,
        "completion_tokens": 15,
        "total_tokens": 39,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_calls_reasoning_and_samples():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    own = record(text="", reasoning="I think.", tool_calls=(call,), finish_reason="tool_calls")
    (choice,) = body_of(own)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "I think.",
        "tool_calls": [call],
    }
    samples = tuple(
        {"index": n, "text": t, "finish_reason": "repetition", "logprobs": LOGPROBS}
        for n, t in enumerate("ab")
    )
    one, two = body_of(record(outputs=samples))["choices"]
    assert (one["index"], two["index"], two["message"]["content"]) == (0, 1, "b")
    assert one["finish_reason"] == "length"
    (token,) = one["logprobs"]["content"]
    assert token == {
        "token": "é",
        "logprob": -2.0,
        "bytes": [195, 169],
        "top_logprobs": [{"token": "a", "logprob": -0.1, "bytes": [97]}],
    }


def test_completions_and_responses():
    body = body_of(record(endpoint="/v1/completions"))
    assert body["object"] == "text_completion"
    assert body["choices"] == [{**CHOICE, "text": "Hi."}]
    own = record(endpoint="/v1/responses", finish_reason="length", reasoning="I think.")
    body = body_of(own)
    assert (body["object"], body["status"]) == ("response", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    thought, message = body["output"]
    assert thought["type"] == "reasoning"
    assert message["content"] == [{"type": "output_text", "text": "Hi.", "annotations": []}]


def test_an_error():
    error = ItemError(code=400, kind="MediaError", message="no")
    found = line_of(record(text="", error=error), "m", 0)
    assert found["error"] == {"code": "400", "message": "no"}
    assert found["response"]["status_code"] == 400
    assert found["response"]["body"]["error"]["type"] == "MediaError"


@pytest.fixture
def run(fake_llm, tmp_path):
    """Runs a batch with an output in OpenAI's format; returns its lines by custom_id."""

    def run(given, **settings):
        out = tmp_path / "out.jsonl"
        job = plan_batch(given, out, BatchSettings(format="openai", **settings))
        summary = run_batch(job, lambda: fake_llm)
        lines = [json.loads(text) for text in out.read_text().splitlines()]
        assert len(lines) == summary.num_records
        return {own["custom_id"]: own for own in lines}

    return run


def line(custom_id, text):
    body = {"model": "m", "prompt": text}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_lines_run_and_resume(run, fake_llm, jsonl):
    source = jsonl(line("a", "one"), line("b", "bad"), line("c", "x") | {"body": 7})
    found = run(source)
    assert found["a"]["response"]["body"]["choices"][0]["text"] == "a caption of one"
    assert found["a"]["error"] is None
    assert found["b"]["error"]["message"] == "cannot read bad"
    assert found["c"]["error"]["message"] == "the body must be an object"
    num_asked = len(fake_llm.prompts)
    again = run(jsonl(line("a", "one"), line("b", "two"), line("c", "three")), mode="resume")
    assert {own["response"]["status_code"] for own in again.values()} == {200}
    assert len(fake_llm.prompts) == num_asked + 2
    assert again["a"] == {**found["a"], "response": again["a"]["response"]}


def test_lines_in_their_format_without_theirs(run, jsonl):
    found = run(jsonl({"id": 7, "prompt": "one"}))
    assert found["7"]["response"]["body"]["object"] == "chat.completion"


def test_a_prompt_for_all_is_a_mistake(run, jsonl):
    with pytest.raises(ConfigError, match="each line of this one has its own prompt"):
        run(jsonl(line("a", "one")), question="Describe.")


def test_other_files_stay(run, jsonl, tmp_path):
    (tmp_path / "out.jsonl").write_text("mine\n")
    for mode in ("new", "overwrite", "resume"):
        with pytest.raises(ConfigError, match=r"exists"):
            run(jsonl(line("a", "one")), mode=mode)
    assert (tmp_path / "out.jsonl").read_text() == "mine\n"
