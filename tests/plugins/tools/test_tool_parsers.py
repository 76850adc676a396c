"""The tool parsers: each rule alone; the kit's checks for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from mmdeploy_llm_plugins import tools

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.hooks import PluginManager, ToolCall, ToolParser
from mmdeploy_llm.request import Request
from mmdeploy_llm.testing import ToolParserConformance, ToolParserExample
from mmdeploy_llm.testing.plugins.tools import ToolParserSubject
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import TokenUpdate

SPECS = {spec.name: spec for spec in tools.provide_tool_parsers()}
JSON_NAMES = ("hermes", "ernie-x1", "qwen")
XML_NAMES = ("qwen3-coder", "qwen")

PROPERTIES: Mapping[str, Any] = {
    "n": {"type": "integer"},
    "r": {"type": "number"},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "a": {"type": "array"},
    "s": {"type": "string"},
    "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "k": {"type": ["integer", "null"]},
    "u": {},
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}},
}


def call(name: str = "f", arguments: str = '{"x": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def function(*values: tuple[str, str], name: str = "f") -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"<function={name}>\n{parameters}</function>"


def wrapped(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


F1 = ("f", {"x": 1})
MESSAGE = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}'
NO_CALLS = [  # texts that are not calls and stay unchanged
    "no call at all",
    "a <tool_call> that never ends",
    '<tool_call>{"name": broken}</tool_call>',
    '<tool_call>["f", {}]</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"x": "open}</tool_call> more',
    '<tool_call>{"name": "f", "arguments": {"x": 1',
    '<tool_call>{"name": "f", "arguments": {"x": "/tmp/dir',
    '<tool_call>{"name": "f"} and more</tool_call>',
    "<tool_call></tool_call>\n",
    "</tool_call> <tool_call",
    "<tool_call>" + '{"name": "f", "arguments": ' + "[" * 5000 + "</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}</tool_call>",
]
# text, content, calls
JSON_ROWS = [
    (call(), "", (F1,)),
    (call() + "\n" + call("g", "{}"), "", (F1, ("g", {}))),
    ("Let me see.\n\n" + call(), "Let me see.", (F1,)),
    (" \n" + call() + "\nDone. \n", "Done. \n", (F1,)),
    ("one\n" + call() + "\ntwo", "one\ntwo", (F1,)),
    (call(arguments='{"x": "</tool_call>"}'), "", (("f", {"x": "</tool_call>"}),)),
    (call(arguments='{"x": "é\\n\\"q\\""}'), "", (("f", {"x": 'é\n"q"'}),)),
    (call(arguments='"{\\"x\\": 1}"'), "", (F1,)),
    (call(arguments="null"), "", (("f", {}),)),
    ('<tool_call>{"name": "f"}</tool_call>', "", (("f", {}),)),
    ('<tool_call>{"parameters": {"x": 1}, "name": "f"}</tool_call>', "", (F1,)),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>', "", (F1,)),
    ('<tool_call>{"name": "f", "arguments": {"x": 1}}', "", (F1,)),
    ("<tool_call>oops\n" + call() + " so", "<tool_call>oops so", (F1,)),
    ('<tool_call>{"x": "a}</tool_call>' + call(), '<tool_call>{"x": "a}</tool_call>', (F1,)),
]
XML_ROWS = [
    (wrapped(function(("n", "1"))), "", (("f", {"n": 1}),)),
    (wrapped(function(("s", "1"), ("b", "True"))), "", (("f", {"s": "1", "b": True}),)),
    (
        wrapped(function(("r", "1.5"), ("o", '{"y": [1]}'))),
        "",
        (("f", {"r": 1.5, "o": {"y": [1]}}),),
    ),
    (wrapped(function(("a", "[1, 2]"), ("n", "many"))), "", (("f", {"a": [1, 2], "n": "many"}),)),
    (wrapped(function(("m", "null"), ("k", "None"))), "", (("f", {"m": None, "k": None}),)),
    (wrapped(function(("m", "7"), ("k", "7"))), "", (("f", {"m": "7", "k": 7}),)),
    (wrapped(function(("u", "1"), ("other", "1"))), "", (("f", {"u": "1", "other": "1"}),)),
    (wrapped(function(("n", "1"), name="g")), "", (("g", {"n": "1"}),)),
    (wrapped(function(("s", "  a\n    b\n"))), "", (("f", {"s": "  a\n    b\n"}),)),
    (wrapped(function(("s", "<b>1 < 2</b>"))), "", (("f", {"s": "<b>1 < 2</b>"}),)),
    (wrapped(function()), "", (("f", {}),)),
    (function(("n", "1")), "", (("f", {"n": 1}),)),
    (function(("n", "1")) + "\n</tool_call>\nso", "so", (("f", {"n": 1}),)),
    (function(("n", "1")) + "\n" + function(), "", (("f", {"n": 1}), ("f", {}))),
    ("See:\n" + wrapped(function(("n", "1"))), "See:", (("f", {"n": 1}),)),
    ("<tool_call><function=f><parameter=n>1", "<tool_call><function=f><parameter=n>1", ()),
    ("<tool_call><function=f></tool_call>", "<tool_call><function=f></tool_call>", ()),
    ("<function=f>x</function>", "<function=f>x</function>", ()),
]
EXAMPLES = {
    "hermes": JSON_ROWS + [(text, text, ()) for text in NO_CALLS],
    "ernie-x1": JSON_ROWS + [(text, text, ()) for text in NO_CALLS],
    "qwen3-coder": [*XML_ROWS, (call(), call(), ())],
    "qwen": JSON_ROWS + XML_ROWS + [(text, text, ()) for text in NO_CALLS],
    "gpt-oss": [
        (MESSAGE, "", (F1,)),
        (MESSAGE + "<|call|>", "", (F1,)),
        ("<|start|>assistant" + MESSAGE + "<|call|>", "", (F1,)),
        ("I look." + MESSAGE + "<|call|>" + MESSAGE, "I look.", (F1, F1)),
        (' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>', "", (F1,)),
        (MESSAGE.replace(" <|constrain|>json", ""), "", (F1,)),
        (MESSAGE.replace("functions.f", "browser.open"), "", (("browser.open", {"x": 1}),)),
        (MESSAGE[:-1], MESSAGE[:-1], ()),
        (MESSAGE.replace("{", "["), MESSAGE.replace("{", "["), ()),
        ("<|channel|>final<|message|>{}", "<|channel|>final<|message|>{}", ()),
        ("add to=functions.f to it", "add to=functions.f to it", ()),
    ],
    "ernie-45-vl-thinking": [
        (call() + "\n" + call(), "", (F1, F1)),
        ("\n \n" + call() + " so", "so", (F1,)),
        ("so " + call(), "so " + call(), ()),
        (NO_CALLS[2] + call(), NO_CALLS[2] + call(), ()),
    ],
}


def new_parser(name: str) -> ToolParser:
    manager = PluginManager.load(plugins=["tools"])
    return manager.build(manager.tool_parser(name))


class TestEveryParser(ToolParserConformance):
    """Runs all checks of the kit on all parsers."""

    @pytest.fixture(scope="class", params=SPECS.values(), ids=SPECS)
    @classmethod
    def subject(cls, request: pytest.FixtureRequest) -> Iterator[ToolParserSubject]:
        name = request.param.name
        examples = tuple(
            ToolParserExample(text=text, content=content, calls=calls, tools=(TOOL,))
            for text, content, calls in EXAMPLES[name]
            if len(text) < 1000
        )
        return ToolParserSubject(spec=request.param, examples=examples)


@pytest.mark.parametrize("name", JSON_NAMES)
def test_long_texts_that_are_no_calls(name: str) -> None:
    """They are too long for the kit, which splits its examples everywhere."""
    for text in NO_CALLS:
        if len(text) > 1000:
            assert ToolParserSubject(spec=SPECS[name]).result((text,)) == (text, ())


def test_arguments_are_given_as_they_were_written() -> None:
    written = '{ "x":1.0,\n "y" : "\\u00e9" }'
    (found,) = new_parser("hermes").parse(call(arguments=written))
    assert isinstance(found, ToolCall)
    assert found.arguments == written


@pytest.mark.parametrize("name", JSON_NAMES)
def test_a_call_comes_as_soon_as_it_is_whole(name: str) -> None:
    parser = new_parser(name)
    parser.start(())
    *most, last = call()
    assert [parser.feed(piece) for piece in most] == [[]] * len(most)
    (found,) = parser.feed(last)
    assert isinstance(found, ToolCall)
    assert parser.feed("\nso") == ["so"]


@pytest.mark.parametrize("name", JSON_NAMES)
def test_content_streams(name: str) -> None:
    parser = new_parser(name)
    parser.start(())
    assert [parser.feed(piece) for piece in ("I", " see ", "<b>", "it", " <to")] == [
        ["I"],
        [" see"],
        [" <b>"],
        ["it"],
        [],
    ]
    assert parser.feed("x") == [" <tox"]


def test_a_long_text_in_small_pieces_is_linear() -> None:
    parser = new_parser("qwen")
    parser.start(())
    texts = [item for _ in range(20_000) for item in parser.feed("word < ")]
    assert sum(map(len, texts)) + sum(map(len, parser.finish())) == 140_000


def test_gpt_oss_both_parsers_and_special_tokens(byte_tokenizer: Any) -> None:
    """Has reasoning, text for the user, and a call whose last token ends the request."""
    said = "<|channel|>{}<|message|>{}<|end|><|start|>assistant"
    text = said.format("analysis", "why") + said.format("commentary", "I look.") + MESSAGE
    names = ("start", "channel", "constrain", "message", "end", "call", "return")
    tokenizer = byte_tokenizer([f"<|{name}|>" for name in names], "<|return|>")
    manager = PluginManager.load(plugins=["tools", "reasoning"])
    delivery = Delivery(
        tokenizer,
        lambda: manager.build(manager.reasoning_parser("gpt-oss")),
        "r",
        lambda: manager.build(manager.tool_parser("gpt-oss")),
        "t",
    )
    end_id = tokenizer.convert_tokens_to_ids("<|call|>")
    ids = [*tokenizer(text).input_ids, end_id]
    request = Request(
        request_id="r",
        prompt="",
        prompt_token_ids=[0],
        prompt_text="<|start|>user<|message|>hi<|end|><|start|>assistant",
        params=SamplingParams(max_tokens=1000),
        eos_token_ids=frozenset({end_id}),
        output_token_ids=ids,
    )
    update = TokenUpdate(request=request, new_token_ids=tuple(ids), finish_reason="stop")
    (output,) = delivery.deliver([update])
    assert output.is_ok, output.error_msg
    assert (output.outputs.reasoning_content, output.outputs.text) == ("why", "I look.")
    assert [(call.name, call.arguments) for call in output.outputs.tool_calls] == [
        ("f", '{"x": 1}')
    ]
    assert output.outputs.finish_reason == "tool_calls"
