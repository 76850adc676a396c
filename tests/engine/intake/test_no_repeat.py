"""A request must not repeat what its own rule, its family's, or none forbids."""

import pytest

from mmdeploy_llm.errors import CheckpointError, RequestError
from mmdeploy_llm.values.params import NoRepeatNGramParams, SamplingParams

USUAL = {"no_repeat_ngram": {"size": 5, "window": 20, "may_repeat": ["<think>"]}}


@pytest.fixture
def rule_of(make_intake, tokenizer):
    def resolve(generation=USUAL, **params):
        intake = make_intake(generation=generation)
        request = intake.accept("hello", SamplingParams(**params))[0]
        return request.params.no_repeat_ngram

    return resolve


def test_the_rule_of_the_family_holds_where_a_request_has_none(rule_of, tokenizer):
    ids = tuple(tokenizer.encode("<think>"))
    usual = NoRepeatNGramParams(size=5, window=20, may_repeat_token_ids=ids)
    assert rule_of() == rule_of(no_repeat_ngram=True) == usual
    assert rule_of(no_repeat_ngram=False) is None
    assert rule_of(no_repeat_ngram_size=3) is None
    assert rule_of(no_repeat_ngram={"size": 2}).size == 2


def test_without_a_family_of_that_kind_nothing_is_usual(rule_of):
    assert rule_of({}) is None
    assert rule_of({}, no_repeat_ngram=True) == NoRepeatNGramParams()


def test_texts_and_ids_that_may_repeat(rule_of, tokenizer):
    found = rule_of({}, no_repeat_ngram={"may_repeat": "hello world", "may_repeat_token_ids": 3})
    assert found.may_repeat == ()
    assert set(found.may_repeat_token_ids) == {3, *tokenizer.encode("hello world")}
    for wrong in ({"may_repeat_token_ids": [10**6]}, {"may_repeat": ["\ud800"]}):
        with pytest.raises(RequestError):
            rule_of({}, no_repeat_ngram=wrong)


@pytest.mark.parametrize("wrong", [{"size": 0}, [3], "x", {"odd": 1}])
def test_a_checkpoint_with_a_rule_that_is_none_is_refused(make_intake, wrong):
    with pytest.raises(CheckpointError, match="no_repeat_ngram"):
        make_intake(generation={"no_repeat_ngram": wrong})
