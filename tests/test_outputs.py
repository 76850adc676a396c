"""Outputs as callers read them: like vLLM's, like FastDeploy's, as plain data, pickled."""

import copy
import json
import math
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pandas
import pytest

from mmdeploy_llm.media.kept import KeptImage
from mmdeploy_llm.values.outputs.pooled import ClassifyOutput, EmbeddingOutput, ScoreOutput
from mmdeploy_llm.values.outputs.request_output import (
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


def named(output, item, **values):
    return replace(output, item=item, **values)


class TestJson:
    def test_of_any_item_and_any_number(self, output):
        odd = {
            1: object(),
            "path": Path("a.png"),
            "image": KeptImage(size=(3, 2), form="RGB image"),
            "nan": math.nan,
            "text": "\ud800",
        }
        entry = {5: Logprob(logprob=-math.inf, rank=1)}
        data = json.loads(named(output, odd, prompt_logprobs=(None, entry)).to_json())
        assert data["item"]["path"] == "a.png"
        assert data["item"]["image"] == {"form": "RGB image", "size": [3, 2]}
        assert data["item"]["nan"] is None
        assert data["item"]["text"] == "\ud800"
        assert data["item"]["1"].startswith("<object object")
        assert data["prompt_logprobs"] == [
            None,
            {"5": {"logprob": None, "rank": 1, "decoded_token": None}},
        ]

    def test_indented(self, output):
        assert json.loads(output.to_json(indent=2)) == json.loads(output.to_json())


class TestRow:
    def test_a_table_has_no_nested_values(self, output):
        frame = pandas.DataFrame(one.to_row() for one in [output, named(output, "b")])
        assert list(frame["item"]) == ["p", "b"]
        assert list(frame["text"]) == ["a", "a"]
        assert set(map(type, output.to_row().values())) <= {str, int, float, type(None)}

    @pytest.mark.parametrize(
        ("item", "name"),
        [
            ("a text", "a text"),
            ([1, 2, 3], "[1, 2, 3]"),
            (
                {"prompt": "p", "multimodal_data": {"image": ["a.png", Path("b.png")]}},
                "a.png, b.png",
            ),
            ({"prompt": "p", "multimodal_data": {"pdf": {"pdf": "c.pdf"}}}, "c.pdf"),
            (
                [
                    {"role": "system", "content": "be.brief"},
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "d.png?"},
                            {"type": "image_url", "image_url": {"url": "e.png"}},
                        ],
                    },
                ],
                "e.png",
            ),
            ({"multimodal_data": {"image": list("uvwxyz")}}, "u, v, w, x and 2 more"),
            ({"prompt": "p", "adapter": "sql", "chat_template_kwargs": {"mood": "calm"}}, "p"),
        ],
        ids=["text", "ids", "media", "pdf", "chat", "many", "other"],
    )
    def test_an_item_is_named_by_its_media(self, output, item, name):
        assert named(output, item).to_row()["item"] == name


class TestShown:
    def test_three_lines(self, output):
        one = replace(output, outputs=Completions([FIRST]), num_input_image_tokens=1)
        assert repr(one).splitlines() == [
            "RequestOutput('r', 'p')",
            "  stop: 'a', 1 tool call",
            "  2 prompt tokens (1 image), 2 generated",
        ]

    def test_errors_and_long_texts_are_cut(self, output):
        long = CompletionOutput(text="x" * 5000, finish_reason="length")
        told = repr(replace(output, outputs=Completions([long, SECOND]), item="y" * 5000))
        assert "error 500: lost" in told
        assert len(told) < 1000

    def test_html_escapes_what_comes_from_outside(self, output):
        evil = "<script>alert(1)</script>\"'"
        own = CompletionOutput(text=evil, reasoning_content=evil, error_code=500, error_msg=evil)
        item = {"multimodal_data": {"image": [f"{evil}.png", "http://there/a.png", "/etc/b.png"]}}
        page = named(output, item, outputs=Completions([own]))._repr_html_()
        assert "<script" not in page
        assert page.count("&lt;script&gt;") >= 4
        assert page.count("<img") == 1, "no picture is loaded from a server or an absolute path"

    def test_html_of_pictures(self, output):
        kept = KeptImage(size=(3, 2), form="RGB image", thumbnail=b"jpeg")
        page = named(output, {"multimodal_data": {"image": [kept, "sub/a.png"]}})._repr_html_()
        assert 'src="data:image/jpeg;base64,anBlZw=="' in page
        assert 'src="sub/a.png"' in page


@pytest.mark.parametrize(
    ("name", "place"),
    [("text", r"outputs\.text"), ("error", "error_msg"), ("reasoning", "reasoning_content")],
)
def test_an_attribute_that_is_elsewhere_is_pointed_to(output, name, place):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use .*{place}"):
        getattr(output, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = output.nothing
    with pytest.raises(AttributeError, match="use reasoning_content"):
        _ = output.outputs.reasoning
    assert not hasattr(output, name)


@pytest.mark.parametrize(
    ("cls", "name", "place"),
    [
        (EmbeddingOutput, "outputs", "embedding"),
        (ScoreOutput, "relevance_score", "score"),
        (ClassifyOutput, "probs", "probabilities"),
    ],
)
def test_what_others_call_a_vector_or_a_score_is_pointed_to(cls, name, place):
    own = cls(item="a", metrics=RequestMetrics(arrival_time=0.0), error_code=400, error_msg="no")
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {place}"):
        getattr(own, name)
    assert repr(own) == f"{cls.__name__}('a', error 400: no)"
