"""SamplingParams and GuidedDecodingParams: defaults, ranges, messages; they are immutable."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("name", ["temperature", "stop", "a_new_name"])
def test_setting_a_field_says_how_to_make_a_changed_copy(name):
    params = SamplingParams(temperature=0.5, stop="x")
    with pytest.raises(ConfigError, match=rf"cannot be changed.* replace\({name}=1\) returns"):
        setattr(params, name, 1)
    with pytest.raises(ConfigError, match=rf"cannot be changed; replace\({name}=None\)"):
        delattr(params, name)
    assert params == SamplingParams(temperature=0.5, stop="x")


def test_a_changed_copy_is_checked_and_keeps_what_was_not_given_open():
    params = SamplingParams(temperature=0.5, stop="x")
    changed = params.replace(stop=["y"], seed=3)
    assert changed == SamplingParams(temperature=0.5, stop="y", seed=3)
    assert changed.model_fields_set == {"temperature", "stop", "seed"}
    assert changed.replace(temperature=None).temperature is None
    with pytest.raises(ConfigError, match="top_p"):
        params.replace(top_p=2)
    with pytest.raises(ConfigError, match="did you mean 'top_p'"):
        params.replace(topp=1)
    guided = GuidedDecodingParams(json={"type": "object"})
    assert guided.replace() == guided
    assert guided.replace(json=None, regex="a").regex == "a"


NOT_OPEN = [
    name for name, field in SamplingParams.model_fields.items() if field.default is not None
]


@pytest.mark.parametrize("name", [*NOT_OPEN, "stop_words_ids"])
def test_none_leaves_the_default(name):
    assert SamplingParams(**{name: None}) == SamplingParams()


def test_none_leaves_the_default_of_the_engine_too():
    names = ("blocked_plugins", "logits_processors", "max_logprobs", "allowed_media_domains")
    assert EngineConfig(model="m", **dict.fromkeys(names)) == EngineConfig(model="m")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, [None]) for name in ("stop", "stop_token_ids", "bad_words", "stop_words_ids")),
        ("bad_words_token_ids", [3, None]),
        ("stop_token_sequences", [[3, None]]),
        ("logit_bias", {3: None}),
        ("logits_processors", ["a", None]),
    ],
)
def test_none_inside_a_list_is_refused(name, value):
    with pytest.raises(ConfigError, match="None is not allowed inside a list or dict; leave it"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["early_stop", "guided_decoding"])
def test_names_of_options_inside_are_texts(name):
    with pytest.raises(ConfigError, match=f"{name} has option 0; names are texts"):
        SamplingParams(**{name: {0: 0}})
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: {"nonsense": 0}})


def test_stop_sequences_are_lists_of_ids_under_two_names():
    expected = ((1, 2), (3,))
    assert SamplingParams(stop_token_sequences=[[1, 2], [3]]).stop_token_sequences == expected
    assert SamplingParams(stop_words_ids=[(1, 2), 3]).stop_token_sequences == expected
    assert SamplingParams(stop_words_ids=7).stop_token_sequences == ((7,),)
    with pytest.raises(ConfigError, match="another name of stop_token_sequences; give one"):
        SamplingParams(stop_words_ids=[1], stop_token_sequences=[2])
    for wrong in ([[]], [[-1]], [["a"]], [[2**63]]):
        with pytest.raises(ConfigError, match="stop_token_sequences"):
            SamplingParams(stop_token_sequences=wrong)


def made(params: type, **values):
    """Returns the object, None when a ConfigError says what is wrong with the values."""
    try:
        return params(**values)
    except ConfigError as error:
        message = str(error)
    assert params.__name__ in message
    assert len(message) < 2000
    return None


HUGE = st.sampled_from(
    [
        *(10**40, -(10**40), 2**63, 2**64, 10**400, 10**5000, 2**63 - 1, "9" * 30, True),
        *(1e308, -1e308, 5e-324, -0.0, 1e19, float("inf"), float("nan")),
    ]
)
NUMBERS = [
    name
    for name, field in SamplingParams.model_fields.items()
    if any(word in str(field.annotation) for word in ("int", "float"))
]


@given(
    st.sampled_from(NUMBERS), HUGE, st.sampled_from(["plain", "list", "lists", "keys", "values"])
)
def test_a_huge_number_is_a_value_or_a_config_error(name, number, form):
    """Nothing else is ever raised, and whatever is accepted fits the arrays of the sampler."""
    forms = {"list": [number], "lists": [[number]], "keys": {number: 1.0}, "values": {1: number}}
    params = made(SamplingParams, **{name: forms.get(form, number)})
    if params is None:
        return
    assert pickle.loads(pickle.dumps(params)) == params
    assert len(repr(params)) < 5000
    found = getattr(params, name)
    assert not isinstance(found, int) or abs(found) < 2**63


@pytest.mark.filterwarnings("ignore:trust_remote_code")
@given(st.sampled_from(list(EngineConfig.model_fields)), HUGE)
def test_a_huge_number_for_the_engine_is_a_value_or_a_config_error(name, number):
    config = made(EngineConfig, **{"model": "m", name: number})
    found = getattr(config, name, None)
    assert not isinstance(found, int) or abs(found) < 2**63


def test_seed_none_is_drawn_once_and_stands_in_the_config():
    drawn = {EngineConfig(model="m", seed=None).seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(isinstance(seed, int) for seed in drawn)
    config = EngineConfig(model="m", seed=None)
    assert config.replace(quantization=None).seed == pickle.loads(pickle.dumps(config)).seed
    assert config.replace(quantization=None).seed == config.seed
    assert EngineConfig(model="m").seed == 0
    assert SamplingParams(seed=None).seed is None


def test_arguments_of_logits_processors_are_plain_values():
    given = {"logit_bias": {3: 1.5}, "words": ["a", ("b", None)], "is_on": True}
    assert SamplingParams(logits_processors_args=given).logits_processors_args == given
    nested: list = []
    for _ in range(20):
        nested = [nested]
    for wrong in (object(), print, {"a": object()}, [10**40], nested, {object(): 1}, b"x"):
        with pytest.raises(ConfigError, match="numbers, texts, lists and dicts"):
            SamplingParams(logits_processors_args={"value": wrong})
    for wrong in (print, [print], int):
        with pytest.raises(ConfigError, match="provide_logits_processors"):
            SamplingParams(logits_processors=wrong)


def test_early_stop_is_read_from_fastdeploys_options():
    params = SamplingParams(early_stop={"window_size": 3})
    assert params.early_stop.window_size == 3
    assert params.early_stop.threshold == 0.99
    for options, window_size in (
        ({"early_stop_config": {"window_size": 3}}, 3),
        ({"early_stop_config": {"window_size": 3}, "enable_early_stop": True}, 3),
        ({"enable_early_stop": True}, 3000),
        ({"early_stop_config": {"strategy": "repetition"}}, 3000),
    ):
        assert EngineConfig(model="m", **options).early_stop_config.window_size == window_size
    for options in ({}, {"enable_early_stop": False, "early_stop_config": {}}):
        assert EngineConfig(model="m", **options).early_stop_config is None
    for wrong in ({"strategy": "other"}, {"window_size": 0}, {"threshold": 1.0}, {"window": 3}):
        with pytest.raises(ConfigError, match="early_stop"):
            SamplingParams(early_stop=wrong)
        with pytest.raises(ConfigError, match="early_stop_config"):
            EngineConfig(model="m", early_stop_config=wrong)


def test_frozen_and_picklable():
    params = SamplingParams(temperature=0.5, stop="x", logit_bias={3: 1.5})
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
    assert GuidedDecodingParams(regex="a", disable_any_whitespace=False)
    with pytest.raises(ConfigError, match="for JSON, not regex"):
        GuidedDecodingParams(regex="a", disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": 0}, "size"),
        ({"size": 30, "window": 20}, "window must be at least size = 30, got 20"),
        ({"may_repeat_token_ids": [-1]}, "may_repeat_token_ids"),
        ({"whitelist": [1]}, "whitelist"),
        ("perhaps", "no_repeat_ngram"),
    ],
)
def test_ngrams_that_cannot_be_kept_from_repeating(given, words):
    with pytest.raises(ConfigError, match=words):
        SamplingParams(no_repeat_ngram=given)


def test_ngrams_have_one_rule():
    own = SamplingParams(no_repeat_ngram={"may_repeat": "<td>"}).no_repeat_ngram
    assert (own.size, own.window, own.may_repeat) == (30, 90, ("<td>",))
    with pytest.raises(ConfigError, match="give no_repeat_ngram_size or no_repeat_ngram"):
        SamplingParams(no_repeat_ngram_size=3, no_repeat_ngram={})
    assert SamplingParams(no_repeat_ngram_size=3, no_repeat_ngram=False).no_repeat_ngram is False
