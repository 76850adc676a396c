"""Outputs as callers read them: like vLLM's, like FastDeploy's, as plain data, pickled."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from mmdeploy_llm.outputs import (
    CompletionOutput,
    Completions,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ToolCall,
)

CALL = ToolCall(id="c", name="f", arguments="{}")
FIRST = CompletionOutput(
    token_ids=[5, 6],
    text="a",
    reasoning_content="r",
    finish_reason="stop",
    logprobs=({5: Logprob(logprob=-1.0, rank=1)}, {6: Logprob(logprob=-2.0, rank=1)}),
    cumulative_logprob=-3.0,
    tool_calls=(CALL,),
)
SECOND = CompletionOutput(index=1, token_ids=[7], text="b", error_code=500, error_msg="lost")


@pytest.fixture
def output():
    return RequestOutput(
        request_id="r",
        prompt="p",
        item={"prompt": "p"},
        prompt_token_ids=[1, 2],
        outputs=Completions([FIRST, SECOND]),
        finished=True,
        metrics=RequestMetrics(arrival_time=1.0),
    )


def test_the_attributes_of_completion_0_without_a_copy(output):
    names = "index send_idx token_ids text reasoning_content resoning_content finish_reason "
    names += "logprobs cumulative_logprob tool_calls"
    for name in names.split():
        assert getattr(output.outputs, name) is getattr(output.outputs[0], name), name
    assert output.outputs[0] is FIRST
    assert output.outputs.resoning_content == FIRST.resoning_content == "r"


def test_a_sequence_of_completions(output):
    assert len(output.outputs) == 2
    assert list(output.outputs) == [FIRST, SECOND]
    assert output.outputs[-1] is SECOND
    assert output.outputs[:1] == (FIRST,)
    assert [completion.is_ok for completion in output.outputs] == [True, False]
    with pytest.raises(IndexError):
        output.outputs[2]
    with pytest.raises(FrozenInstanceError):
        output.outputs.items = ()
    with pytest.raises(AttributeError):
        output.outputs.nothing  # noqa: B018


def test_ids_are_lists(output):
    assert output.outputs.token_ids + [1] == [5, 6, 1]  # noqa: RUF005 - as a ported script has it
    assert output.prompt_token_ids + [3] == [1, 2, 3]  # noqa: RUF005


def test_copies_are_equal(output):
    for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output), copy.copy(output)):
        assert other == output
        assert other.outputs.text == "a"


def test_plain_data(output):
    data = json.loads(json.dumps(output.to_dict()))
    assert [own["text"] for own in data["outputs"]] == ["a", "b"]
    assert data["outputs"][0]["tool_calls"] == [CALL.to_dict()]
    assert data["outputs"][0]["cumulative_logprob"] == -3.0
    assert data["outputs"][1]["error_msg"] == "lost"
    assert (data["prompt"], data["item"], data["prompt_token_ids"]) == (
        "p",
        {"prompt": "p"},
        [1, 2],
    )
