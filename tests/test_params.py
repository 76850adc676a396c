"""SamplingParams and GuidedDecodingParams: defaults, ranges, messages; they are immutable."""

import json
import pickle

import pytest

from mmdeploy_llm import ConfigError, EngineConfig, GuidedDecodingParams, SamplingParams


def test_open_fields_are_none():
    params = SamplingParams()
    assert params.n == 1
    assert params.min_tokens == 1
    open_fields = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
    assert all(getattr(params, name) is None for name in open_fields)


def test_one_string_is_a_tuple_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams(bad_words=None, stop=None, logit_bias=None).bad_words == ()


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "greater than or equal to 1"),
        ("presence_penalty", 2.5, "less than or equal to 2"),
        ("frequency_penalty", -3, "greater than or equal to -2"),
        ("repetition_penalty", 0, "greater than 0"),
        ("temperature", -0.1, "greater than or equal to 0"),
        ("temperature", float("nan"), "finite"),
        ("top_p", 1.5, "less than or equal to 1"),
        ("top_k", -2, "greater than or equal to -1"),
        ("top_k", 2.5, "integer"),
        ("min_p", 2, "less than or equal to 1"),
        ("seed", -1, "greater than or equal to 0"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("logprobs", -2, "greater than or equal to -1"),
        ("stop", [""], "matches everywhere"),
        ("stop_token_ids", [-4], "greater than or equal to 0"),
        ("logit_bias", {"word": 1.0}, "integer"),
    ],
)
def test_a_value_out_of_range_names_field_limit_and_value(field, value, allowed):
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert f"SamplingParams.{field}" in message
    assert allowed in message
    assert "got " in message


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ConfigError, match="has no option 'max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=3)
    with pytest.raises(ConfigError, match=r"known: .*temperature"):
        SamplingParams(zzzz=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be in"),
        ({"reasoning_max_tokens": 9, "max_tokens": 4}, "reasoning_max_tokens must be in"),
    ],
)
def test_limits_must_agree(values, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**values)


def test_frozen_and_picklable():
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.5})
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 1
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("values", "is_greedy"),
    [({"temperature": 0}, True), ({"top_k": 1}, True), ({"top_p": 0}, True), ({}, False)],
)
def test_greedy(values, is_greedy):
    assert SamplingParams(**values).is_greedy is is_greedy


@pytest.mark.parametrize("params", [SamplingParams, GuidedDecodingParams, EngineConfig])
def test_every_field_says_what_it_does_and_what_none_means(params):
    """The tables of docs/options.md are generated from these sentences."""
    for name, field in params.model_fields.items():
        text = field.description or ""
        assert len(text.split()) >= 4, name
        assert not text.endswith("."), name
        is_open = field.default in (None, "auto") and params is not GuidedDecodingParams
        assert not is_open or str(field.default) in text, name


class TestGuided:
    @pytest.mark.parametrize(
        "values",
        [
            {"json": {"type": "object"}},
            {"regex": "a+"},
            {"choice": ["a", "b"]},
            {"grammar": 'root ::= "a"'},
            {"json_object": True},
            {"structural_tag": {"structures": [], "triggers": []}},
            {"json": {}},
            {"regex": "a", "json_object": False},
        ],
    )
    def test_one_constraint(self, values):
        assert GuidedDecodingParams(**values)

    @pytest.mark.parametrize("values", [{}, {"regex": "a", "choice": ["b"]}])
    def test_none_and_two_are_refused(self, values):
        with pytest.raises(ConfigError, match="exactly one of json, regex"):
            GuidedDecodingParams(**values)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_object", "json_schema": TEXT}, {"json": TEXT}),
        ({"type": "json_schema", "json_schema": SCHEMA}, {"json": SCHEMA}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
            {"json": SCHEMA},
        ),
        (TAG, {"structural_tag": TAG}),
    ],
)
def test_response_format_is_a_constraint(given, expected):
    params = SamplingParams(response_format=given)
    guided = expected and GuidedDecodingParams(**expected)
    assert params.guided_decoding == guided
    assert SamplingParams(**params.model_dump(by_alias=True)).guided_decoding == guided
    assert SamplingParams(response_format=given, guided_decoding=guided) == params


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "type is text, json_object, json_schema or structural_tag"),
        ({"type": "xml"}, "'xml'"),
        ({"type": "json_schema"}, "json_schema must be"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "json_schema must be"),
        ("json_object", "response_format must be a dict"),
    ],
)
def test_a_wrong_response_format(given, reason):
    with pytest.raises(ConfigError, match=reason):
        SamplingParams(response_format=given)


def test_response_format_and_guided_decoding_exclude_each_other():
    guided = GuidedDecodingParams(regex="a")
    with pytest.raises(ConfigError, match="not both"):
        SamplingParams(response_format={"type": "json_object"}, guided_decoding=guided)


def test_whitespace_is_an_option_of_json():
    assert GuidedDecodingParams(json={}, disable_any_whitespace=False)
    with pytest.raises(ConfigError, match="for JSON, not for regex"):
        GuidedDecodingParams(regex="a", disable_any_whitespace=False)
