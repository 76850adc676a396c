"""Constraints on the answers of a model that thinks: the bundled one, through every way to it."""

import json
import re

import pytest

from mmdeploy_llm import LLM, GuidedDecodingParams, InvalidAnswerError, SamplingParams

pytest.importorskip("llguidance", reason="needs llguidance: the extra 'guided'")

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "size": {"type": "integer", "maximum": 9}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a red circle."}]
CONSTRAINTS = {
    "choice": {"guided_decoding": {"choice": ["red", "blue"]}},
    "regex": {"guided_decoding": {"regex": "(red|blue) (circle|ring)"}},
    "json": {"guided_decoding": {"json": SCHEMA}},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    },
    "json, thinking limited": {"guided_decoding": {"json": SCHEMA}, "reasoning_max_tokens": 3},
}


def follows(name, text):
    if name == "choice":
        return text in ("red", "blue")
    if name == "regex":
        return re.fullmatch("(red|blue) (circle|ring)", text) is not None
    return set(json.loads(text)) == {"colour", "size"}


@pytest.fixture(scope="module")
def llm():
    options = {"use_warmup": False, "num_threads": 1, "quiet": True}
    with LLM("shapes-vl", reasoning_parser="auto", **options) as opened:
        yield opened


def params(name="json", **fields):
    fields = {"temperature": 0, "max_tokens": 200, **CONSTRAINTS[name], **fields}
    return SamplingParams(**fields)


def ask(llm, own, **options):
    (output,) = llm.chat(ASK, own, use_tqdm=False, **options)
    return output


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_model_thinks_and_then_keeps_the_constraint(llm, name):
    output = ask(llm, params(name))
    assert output.outputs.reasoning_content
    assert follows(name, output.outputs.text)
    assert (output.outputs.is_valid, output.error_code) == (True, 200)
    at_once = ask(llm, params(name), chat_template_kwargs={"enable_thinking": False}).outputs
    assert not at_once.reasoning_content
    assert follows(name, at_once.text)


def test_without_a_constraint_nothing_is_valid_or_not(llm):
    assert ask(llm, SamplingParams(max_tokens=3)).outputs.is_valid is None


def test_samples_and_streams(llm):
    own = params(n=3, temperature=1.0, seed=4, logprobs=1)
    samples = ask(llm, own).outputs
    assert [follows("json", one.text) and one.is_valid for one in samples] == [True] * 3
    deltas = [[] for _ in samples]
    for delta in llm.stream(ASK, own):
        deltas[delta.outputs.index].append(delta.outputs)
    for sample, parts in zip(samples, deltas, strict=True):
        assert "".join(part.text for part in parts) == sample.text
        assert "".join(part.reasoning_content for part in parts) == sample.reasoning_content
        assert [part.is_valid for part in parts] == [None] * (len(parts) - 1) + [True]


@pytest.mark.parametrize(("limit", "part"), [(4, "in its thinking"), (14, "complete")])
def test_a_text_that_is_cut_off_is_told(llm, limit, part):
    own = params(max_tokens=limit, reasoning_max_tokens=None if limit == 4 else 2)
    output = ask(llm, own)
    assert (output.error_code, output.outputs.is_valid) == (422, False)
    assert output.outputs.finish_reason == "length"
    assert part in output.error_msg
    assert output.outputs.reasoning_content
    *_, last = llm.stream(ASK, own)
    assert (last.error_code, last.outputs.is_valid) == (422, False)


def test_a_complete_answer_ends_before_min_tokens(llm):
    output = ask(llm, params("choice", min_tokens=150))
    assert output.outputs.text in ("red", "blue")
    assert (output.error_code, output.outputs.finish_reason) == (200, "stop")


@pytest.mark.full
def test_drafts_change_nothing(llm):
    expected = [ask(llm, params(name)).outputs for name in CONSTRAINTS]
    options = {"use_warmup": False, "num_threads": 1, "quiet": True, "speculative": "ngram"}
    with LLM("shapes-vl", reasoning_parser="auto", **options) as drafting:
        assert [ask(drafting, params(name)).outputs for name in CONSTRAINTS] == expected


def test_a_batch_reports_and_repeats_what_was_cut_off(llm, tmp_path):
    lines = [
        {"id": name, "messages": ASK, "sampling_params": {**CONSTRAINTS["choice"], **fields}}
        for name, fields in (("good", {}), ("cut", {"max_tokens": 4}))
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = llm.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    assert summary.failures == {"422 InvalidAnswerError": 1}
    records = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    cut = {record["id"]: record for record in records}["cut"]
    assert (cut["finish_reason"], cut["error"]["class"]) == ("length", "InvalidAnswerError")
    assert (cut["text"], bool(cut["reasoning"])) == ("", True)


def test_a_limit_on_the_answer_raises_where_errors_do(llm):
    with pytest.raises(InvalidAnswerError, match="in its thinking"):
        llm.chat(ASK, params(max_tokens=4), use_tqdm=False, on_error="raise")


def test_guided_params_name_themselves():
    assert GuidedDecodingParams(json={}).name == "json"
