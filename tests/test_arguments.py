"""The arguments of LLM's methods: what a tokenizer returns, parameters for each prompt, flags."""

import itertools
from collections import UserDict

import numpy as np
import pandas
import pytest
import torch

from mmdeploy_llm import RequestError, SamplingParams
from mmdeploy_llm.client.arguments import (
    Asks,
    as_conversations,
    as_prompts,
    chat_options,
    one_params,
)
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.media.loading.kinds import ModelMedia

ROWS = [[5, 6, 7], [8, 9]]
PADDED = {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
LEFT = {"input_ids": [[5, 6, 7], [0, 8, 9]], "attention_mask": [[1, 1, 1], [0, 1, 1]]}


read = PromptReader.of_model(ModelMedia()).read


def ids_of(prompts):
    return [list(read(prompt).ids) for prompt in as_prompts(prompts)]


@pytest.mark.parametrize(
    "batch",
    [
        PADDED,
        LEFT,
        {"input_ids": ROWS},
        UserDict(PADDED),
        {name: np.array(values) for name, values in PADDED.items()},
        {name: torch.tensor(values) for name, values in LEFT.items()},
        {"input_ids": [torch.tensor(row) for row in ROWS]},
        {**PADDED, "token_type_ids": [[0] * 3] * 2},
        ROWS,
        [np.array(row) for row in ROWS],
        [torch.tensor(row) for row in ROWS],
        [{"input_ids": torch.tensor([row]), "attention_mask": [[1] * len(row)]} for row in ROWS],
    ],
    ids=str,
)
def test_a_batch_of_a_tokenizer(batch):
    assert ids_of(batch) == ROWS


@pytest.mark.parametrize(
    "one",
    [
        {"input_ids": [5, 6, 7]},
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]]},
        {"input_ids": torch.tensor([[5, 6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])},
        {"input_ids": np.array([5, 6, 7], dtype=np.int32), "multimodal_data": None},
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
    ],
    ids=str,
)
def test_one_prompt_of_a_tokenizer(one):
    assert ids_of(one) == [[5, 6, 7]]


def test_the_callers_object_is_the_prompt():
    own = UserDict({"input_ids": [5, 6]})
    assert as_prompts(own)[0] is own
    assert as_prompts([own])[0] is own


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"input_ids": [5, 6], "attention_mask": [1]}, "shape of input_ids"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "consist of 0 and 1"),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 0, 1]}, "a 0 between two 1s"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "the prompt is empty"),
        ({"input_ids": "text"}, "lists, arrays or tensors, got str"),
        ({"input_ids": [[5], 6]}, "found a mixture"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"input_ids": ROWS, "multimodal_data": {}}, "2 sequences, which cannot share multimodal"),
        ({"input_ids": [5.5]}, "must be whole numbers"),
        ({"input_ids": [5], "pixel_values": [0.0]}, "processed media .* in multimodal_data"),
        ({"input_ids": [5], "prompt_token_ids": [5]}, "not both"),
        ({"input_ids": [5], "prompt": "x"}, "exactly one of"),
        ([{"input_ids": ROWS}], "one sequence, but input_ids holds 2"),
    ],
    ids=str,
)
def test_wrong_results_of_a_tokenizer(wrong, message):
    with pytest.raises(RequestError, match=message):
        ids_of(wrong)


@pytest.mark.parametrize("wrong", [np.float32(2), torch.tensor(5), ["a", np.int64(3)]])
def test_a_single_number_is_no_prompt(wrong):
    with pytest.raises(TypeError, match="Invalid type for 'prompt'"):
        as_prompts(wrong)


def test_a_wrong_conversation_is_named():
    with pytest.raises(TypeError, match="conversation 1 must be a list of message dicts, got str"):
        as_conversations([[{"role": "user", "content": "x"}], "hello"])


def pairs_of(asks):
    return [(ask.prompt, ask.params) for ask in asks]


class TestAsks:
    A, B = SamplingParams(seed=1), SamplingParams(seed=2)

    def test_one_for_all_and_one_for_each(self):
        assert pairs_of(Asks(iter(["a", "b"]), self.A)) == [("a", self.A), ("b", self.A)]
        assert pairs_of(Asks(["a"], None)) == [("a", SamplingParams())]
        for each in ([self.A, self.B], (self.A, self.B), iter([self.A, self.B])):
            asks = Asks(["a", "b"], each)
            assert pairs_of(asks) == [("a", self.A), ("b", self.B)]
            assert asks.error is None

    def test_endless_iterables(self):
        pairs = Asks(itertools.count(), itertools.repeat(self.A))
        assert len(list(itertools.islice(pairs, 5))) == 5

    @pytest.mark.parametrize(
        ("num_prompts", "num_params", "message"),
        [
            (3, 2, "has 2 items, but there are more prompts"),
            (2, 3, "more items than the 2 prompts"),
        ],
    )
    def test_other_lengths_are_an_error_after_the_pairs(self, num_prompts, num_params, message):
        pairs = Asks(range(num_prompts), [self.A] * num_params)
        assert len(list(pairs)) == 2
        assert isinstance(pairs.error, ValueError)
        assert message in str(pairs.error)

    def test_a_wrong_item_is_an_error_after_the_pairs(self):
        pairs = Asks(["a", "b"], [self.A, {"seed": 1}])
        assert len(list(pairs)) == 1
        assert isinstance(pairs.error, TypeError)
        assert "item 1" in str(pairs.error)

    @pytest.mark.parametrize("wrong", ["a", {"prompt": "a"}, 5, None])
    def test_one_prompt_is_refused(self, wrong):
        with pytest.raises(TypeError, match="an iterable of prompts"):
            Asks(wrong, None)

    @pytest.mark.parametrize("wrong", ["a", {"seed": 1}, 5])
    def test_wrong_params_are_refused_at_once(self, wrong):
        with pytest.raises(TypeError, match="must be SamplingParams"):
            Asks(["a"], wrong)


class TestFlags:
    def test_they_are_arguments_of_the_template(self):
        options = chat_options({"x": 1}, None, None, False, True)
        assert options["chat_template_kwargs"] == {
            "x": 1,
            "add_generation_prompt": False,
            "continue_final_message": True,
        }
        assert chat_options(None, None, None, None, None) == {}

    @pytest.mark.parametrize(
        ("kwargs", "add", "go_on", "message"),
        [
            (None, True, True, "give one of them"),
            ({"add_generation_prompt": True}, True, None, "given twice"),
            ({"continue_final_message": True}, None, True, "given twice"),
            (None, "yes", None, "must be True, False or None, got 'yes'"),
            ("thinking", None, None, "must be a dict"),
        ],
    )
    def test_wrong_flags(self, kwargs, add, go_on, message):
        with pytest.raises(ValueError, match=message):
            chat_options(kwargs, None, None, add, go_on)


TABLE = pandas.DataFrame({"prompt": ["a", "b"], "image": ["a.png", "b.png"]})


def test_a_table_is_not_read_as_the_names_of_its_columns():
    for call in (as_prompts, lambda prompts: Asks(prompts, None)):
        with pytest.raises(TypeError, match=r"a table \(DataFrame\).*one of its columns"):
            call(TABLE)
        with pytest.raises(TypeError, match=r"a row of a table \(Series\).*give dict\(row\)"):
            call(TABLE.iloc[0])
    assert as_prompts(TABLE["prompt"]) == ["a", "b"]
    assert as_prompts(TABLE.set_index("image")["prompt"]) == ["a", "b"]
    assert as_prompts(dict(TABLE[["prompt"]].iloc[0])) == [{"prompt": "a"}]


def test_a_wrong_prompt_among_others_is_named_by_its_index():
    with pytest.raises(TypeError, match=r"prompts\[1\]: .*NoneType"):
        as_prompts(["a", None])


def test_a_message_given_as_a_prompt_is_told_of_chat():
    with pytest.raises(RequestError, match=r"unknown key 'role'; .* chat\(\)"):
        read({"role": "user", "content": "hi"})


def test_what_is_not_sampling_params_is_told_how_to_become_them():
    with pytest.raises(TypeError, match=r"got dict; write SamplingParams\(\*\*"):
        one_params({"max_tokens": 3})
    with pytest.raises(TypeError, match=r"got the class SamplingParams; call it"):
        one_params(SamplingParams)
