"""Texts that are not Unicode: lone surrogates wherever a caller may pass text. Each is that
request's 400, without a traceback in the log, and its neighbours are answered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdeploy_llm import LLM, ConfigError, GuidedDecodingParams, RequestError, SamplingParams
from mmdeploy_llm.engine.intake.unicode_text import check_unicode

LONE = "\ud800"
PARAMS = SamplingParams(max_tokens=2, temperature=0)
GOOD = [{"role": "user", "content": "hi"}]


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def tool(**function):
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def call(name, arguments):
    calls = [{"function": {"name": name, "arguments": arguments}}]
    return [*GOOD, {"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.fixture(scope="module")
def llm():
    with LLM("shapes-vl", num_threads=1, max_num_seqs=4, allow_media_urls=True) as llm:
        yield llm


CHATS = {
    "content": ([{"role": "user", "content": f"a{LONE}"}], {}),
    "part": (user({"type": "text", "text": LONE}), {}),
    "part type": (user({"type": LONE}), {}),
    "role": ([{"role": LONE, "content": "x"}], {}),
    "name": ([{**GOOD[0], "name": LONE}], {}),
    "key": ([{**GOOD[0], LONE: 1}], {}),
    "reasoning": ([*GOOD, {"role": "assistant", "content": "x", "thinking": LONE}], {}),
    "call": (call(LONE, {}), {}),
    "arguments": (call("f", {"x": [LONE]}), {}),
    "argument text": (call("f", LONE), {}),
    "variable": (GOOD, {"chat_template_kwargs": {"x": {"y": [LONE]}}}),
    "variable name": (GOOD, {"chat_template_kwargs": {LONE: 1}}),
    "template": (GOOD, {"chat_template": "{{ messages }}" + LONE}),
    "template text": (GOOD, {"chat_template": r"{{ '\ud800' }}"}),
    "template file": (GOOD, {"chat_template": f"{LONE}.jinja"}),
    "tool name": (GOOD, tool(name=LONE)),
    "tool description": (GOOD, tool(description=LONE)),
    "tool parameter": (GOOD, tool(parameters={"properties": {LONE: {}}})),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CHATS)
def test_a_chat(llm, name, caplog):
    messages, options = CHATS[name]
    wrong = llm.chat(messages, PARAMS, use_tqdm=False, **options)[0]
    assert (wrong.error_code, wrong.finished) == (400, True), wrong.error_msg
    assert wrong.error_msg.isprintable()
    both = llm.chat([messages, GOOD], PARAMS, use_tqdm=False, **options)
    assert both[0].error_code == 400
    assert both[1].is_ok is not bool(options)
    *_, last = llm.stream(messages, PARAMS, **options)
    assert last.error_code == 400
    assert not caplog.records


PROMPTS = {
    "text": LONE,
    "dict": {"prompt": f"x{LONE}"},
    "key": {"prompt": "x", LONE: 1},
    "kind": {"prompt": "x", "multimodal_data": {LONE: 1}},
}
NAMES = (
    "{}.png",
    "/{}.png",
    "file:///{}",
    "{}://x",
    "data:image/png,{}",
    "data:image/png;base64,{}",
)
NAMES += ("data:image/png;base64,%41{}", "http://127.0.0.1:9/{}", "http://{}/", "s3://{}/x")


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt(llm, name, caplog):
    outputs = llm.generate([PROMPTS[name], "The fox"], PARAMS, use_tqdm=False)
    assert [output.error_code for output in outputs] == [400, 200]
    with pytest.raises(RequestError):
        llm.count_tokens(PROMPTS[name])
    *_, last = llm.stream(PROMPTS[name], PARAMS)
    assert last.error_code == 400
    assert not caplog.records


@pytest.mark.one_is_quick
@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("lone", [LONE, "\udcff"])
def test_a_name_of_media(llm, form, kind, lone, caplog):
    messages = user({"type": kind, kind: form.format(lone)}, {"type": "text", "text": "?"})
    output = llm.chat(messages, PARAMS, use_tqdm=False)[0]
    assert output.error_code in (400, 415), output.error_msg
    assert "plugin" not in output.error_msg  # is not to blame
    assert output.error_msg.isprintable()
    assert not caplog.records


VALUES = {
    "stop": {"stop": ["x", LONE]},
    "bad_words": {"bad_words": LONE},
    "choice": {"guided_decoding": {"choice": ("a", LONE)}},
    "regex": {"guided_decoding": {"regex": LONE}},
    "grammar": {"guided_decoding": {"grammar": f'root ::= "{LONE}"'}},
    "schema": {"guided_decoding": {"json": {"const": LONE}}},
    "schema key": {"guided_decoding": {"json": {"properties": {LONE: {}}}}},
    "schema text": {"guided_decoding": {"json": f'{{"const": "{LONE}"}}'}},
}


@pytest.mark.parametrize("name", VALUES)
def test_a_sampling_parameter(llm, name, caplog):
    values = dict(VALUES[name])
    if "guided_decoding" in values:
        values["guided_decoding"] = GuidedDecodingParams(**values["guided_decoding"])
    params = SamplingParams(max_tokens=2, **values)
    outputs = llm.generate(["The fox"] * 2, [params, PARAMS], use_tqdm=False)
    assert [output.error_code for output in outputs] == [400, 200]
    assert "U+D800, a lone surrogate" in outputs[0].error_msg
    assert not caplog.records


def test_a_name_of_a_parameter_and_options_of_an_engine():
    with pytest.raises(ConfigError):
        SamplingParams(**{LONE: 1})
    with pytest.raises(ConfigError, match="allowed_media_root"):
        LLM("shapes-vl", allowed_media_root=f"/{LONE}")


NESTED = st.recursive(
    st.text(st.characters(categories=["Cs", "Lu", "So"]), max_size=3) | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(categories=["Cs", "Lu"]), max_size=2), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(value=NESTED)
def test_any_nested_value(value):
    try:
        texts = list(_texts(value))
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        with pytest.raises(RequestError, match="is not Unicode text"):
            check_unicode(value, "x")
    else:
        check_unicode(value, "x")


def _texts(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def test_names_in_messages_are_short_however_deep_or_long_the_keys_are():
    value: object = LONE
    for _ in range(5000):
        value = {"k" * 100: value}
    with pytest.raises(RequestError) as caught:
        check_unicode(value, "x")
    assert len(str(caught.value)) < 500
