"""Tools of a request and tool calls in messages: checks, and the form that chat templates read."""

import pytest

from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.engine.intake.tools import read_tools
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.values.outputs.request_output import ToolCall
from mmdeploy_llm.values.params import SamplingParams

PARAMS = SamplingParams(max_tokens=5)
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}{{ tool.function.description }}]"
    "{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{% for name, value in call.function.arguments|items %} {{ name }}={{ value }}{% endfor %}>"
    "{% endfor %}{{ '\n' }}{% endfor %}"
)


class Model:
    """An object with pydantic's interface."""

    def __init__(self, **values):
        self.values = values

    def model_dump(self, exclude_none=False):
        assert exclude_none
        return self.values


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return city


@pytest.mark.parametrize("given", [None, [], ()])
def test_no_tools(given):
    assert read_tools(given) == ()


@pytest.mark.parametrize("given", [TOOL, [TOOL], (TOOL,), Model(**TOOL), [Model(**TOOL)]])
def test_forms_of_tools(given):
    assert read_tools(given) == (TOOL,)


def test_the_type_may_be_missing_and_others_stay():
    (tool,) = read_tools({"function": {"name": "f", "strict": True}, "x": 1})
    assert tool == {"type": "function", "function": {"name": "f", "strict": True}, "x": 1}


def test_python_functions():
    (tool,) = read_tools([weather])
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"]["properties"]["city"]["type"] == "string"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("f", "tool 0 must be .* got 'f'"),
        (5, "tool 0 must be .* got 5"),
        ([TOOL, {"name": "g"}], "tool 1 must be .* got a dict with 'name'"),
        ([{}], "tool 0 must be .* no keys"),
        ([{"type": "retrieval", "function": {"name": "f"}}], "tool 0 must be"),
        ([{"function": {}}], "tool 0 needs a name"),
        ([{"function": {"name": ""}}], "tool 0 needs a name"),
        ([{"function": {"name": "f", "parameters": []}}], r"tool 0 \('f'\): 'parameters' must be"),
        ([{"function": {"name": "f", "x": object()}}], r"tool 0 \('f'\) cannot be written as JSON"),
        ([TOOL, TOOL], "several tools are named 'f'"),
        ([lambda x: x], "tool 0: <lambda> has no schema"),
    ],
)
def test_wrong_tools(given, message):
    with pytest.raises(RequestError, match=message):
        read_tools(given)


def render(intake, messages, **options):
    (request,) = intake.accept({"messages": messages, "chat_template": TEMPLATE, **options}, PARAMS)
    return request


def test_the_template_and_the_request_get_the_tools(intake):
    request = render(intake, [USER], tools=[TOOL])
    assert request.prompt_text == "[f]user: hi\n"
    assert request.tools == (TOOL,)
    same = render(intake, [USER], chat_template_kwargs={"tools": [TOOL]})
    assert (same.prompt_text, same.tools) == (request.prompt_text, request.tools)
    prompt = {"messages": [USER], "tools": TOOL, "chat_template": TEMPLATE}
    (again,) = intake.accept(prompt, PARAMS)
    assert (again.prompt_text, again.tools) == (request.prompt_text, request.tools)
    assert render(intake, [USER], tools=[]).prompt_text == "user: hi\n"


def test_tools_given_twice_or_without_messages(intake):
    with pytest.raises(RequestError, match="given twice"):
        render(intake, [USER], tools=[TOOL], chat_template_kwargs={"tools": [TOOL]})
    with pytest.raises(RequestError, match="tools need 'messages'"):
        intake.accept({"prompt": "hi", "tools": [TOOL]}, PARAMS)
    with pytest.raises(RequestError, match="tool 0 must be"):
        render(intake, [USER], tools=["f"])


def test_placeholders_in_tools_are_text(intake, tokenizer):
    """A placeholder in a description represents no media and is rendered unchanged."""
    function = {"name": "f", "description": " of <|image@placeholder|>"}
    request = render(intake, [USER], tools={"function": function})
    assert request.prompt_text == "[f of <|image@placeholder|>]user: hi\n"
    assert tokenizer.decode(request.prompt_token_ids) == request.prompt_text
    assert request.tools[0]["function"] == function


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "call",
    [
        ToolCall(id="1", name="f", arguments='{"x": "é", "y": 2}'),
        {"id": "1", "function": {"name": "f", "arguments": '{"x": "é", "y": 2}'}},
        {"function": {"name": "f", "arguments": {"x": "é", "y": 2}}},
        Model(function={"name": "f", "arguments": '{"x": "é", "y": 2}'}),
    ],
)
def test_forms_of_calls(intake, call):
    """Templates iterate over the arguments, so they need an object."""
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    request = render(intake, messages)
    assert request.prompt_text == "user: hi\nassistant: <f x=é y=2>\ntool: 5\n"
    assert messages[1]["tool_calls"][0] is call


def test_arguments_that_are_no_object_stay_as_they_are():
    call = {"function": {"name": "f", "arguments": "not JSON"}}
    bare = {"name": "f", "arguments": '{"x": 1}'}
    message = {"role": "assistant", "content": None, "tool_calls": [call, bare]}
    (seen,) = PromptReader.of_model(ModelMedia()).read([message]).messages
    assert list(seen.fields["tool_calls"]) == [call, {"name": "f", "arguments": {"x": 1}}]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ("f", "message 1: 'tool_calls' must be a list"),
        ([5], "message 1, tool call 0 must be a dict"),
    ],
)
def test_wrong_calls(intake, calls, message):
    with pytest.raises(RequestError, match=message):
        render(intake, [USER, {"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("role", ["user", "assistant", "system"])
def test_content_that_is_none_is_empty(intake, role):
    messages = [{"role": role, "content": None}, USER]
    empty = [{"role": role, "content": ""}, USER]
    assert render(intake, messages).prompt_text == render(intake, empty).prompt_text


def test_an_assistant_message_needs_content_or_calls(intake):
    with pytest.raises(RequestError, match="message 0 of role 'assistant' has no 'content'"):
        render(intake, [{"role": "assistant", "tool_calls": []}])
    with pytest.raises(RequestError, match="message 0 of role 'tool' has no 'content'"):
        render(intake, [{"role": "tool", "tool_call_id": "1"}])
