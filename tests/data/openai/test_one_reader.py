"""A conversation is the same to all that read it, in whichever form it came; odd bodies are read as
OpenAI's API reads them, or refused in words that say what is wrong."""

import pytest

from mmdeploy_llm.batch.items import ItemReader
from mmdeploy_llm.data.openai.lines import OpenAILines
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.intake.chat import with_sources
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks.manager import PluginManager
from mmdeploy_llm.media.loading.expanding import PartExpander
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import MediaPart, TextPart

KINDS = PluginManager.load().kinds
URL = "data:image/png;base64,AAAA"
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "text", "text": "What is it?"},
        ],
    },
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "5"},
]
RESPONSES = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": URL, "detail": "low"},
            {"type": "input_text", "text": "What is it?"},
        ],
    },
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "5"},
]


def of_a_model():
    """The reader of a model that takes images."""
    expander = PartExpander(KINDS, model="qwen2_vl", takes=("image",))
    return PromptReader.of_model(ModelMedia(known=("audio",)), expander)


def line_of(body, url="/v1/chat/completions"):
    """The item of a line of OpenAI's Batch API; raises RequestError for one that is refused."""
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}}
    fields = OpenAILines().translated(line).fields
    item = ItemReader(None, SamplingParams(), kinds=KINDS).read(1, fields)
    if isinstance(item, BadItem):
        raise RequestError(item.message)
    return item.prompt


def plain(prompt):
    """Returns what a prompt says, without the names of its parts in messages of errors."""
    read = of_a_model().read(prompt)
    items = iter(with_sources(read.messages, read.media))
    return [
        (
            dict(message.fields),
            [
                (item := next(items)).kind + item.source.uri + str(item.options)
                if isinstance(part, MediaPart)
                else part.text
                for part in message.parts
            ],
        )
        for message in read.messages
    ]


@pytest.mark.parametrize(
    "form",
    [
        lambda: {"messages": CHAT},
        lambda: ItemReader(None, SamplingParams(), kinds=KINDS).read(1, {"messages": CHAT}).prompt,
        lambda: line_of({"messages": CHAT}),
        lambda: line_of({"instructions": "Be brief.", "input": RESPONSES}, "/v1/responses"),
    ],
    ids=["prompt", "line", "chat completions", "responses"],
)
def test_one_conversation_in_four_forms(form):
    call = {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}
    assert plain(form()) == [
        ({"role": "system"}, ["Be brief."]),
        ({"role": "user"}, [f"image{URL}{{}}", "What is it?"]),
        ({"role": "assistant", "tool_calls": [call]}, []),
        ({"role": "tool", "tool_call_id": "c"}, ["5"]),
    ]


def user(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts), **fields}]}


IMAGE = {"type": "image_url", "image_url": {"url": URL}}
GOOD = [  # a body, and the texts and kinds of its last message
    ({"messages": [{"role": "user", "content": "x"}]}, ["x"]),
    ({"messages": [{"role": "developer", "content": "x"}]}, ["x"]),
    ({"messages": [{"role": "user", "name": "Ann", "content": "x"}]}, ["x"]),
    ({"messages": [{"role": "assistant", "content": None}]}, []),
    ({"messages": [{"role": "assistant", "content": "x", "refusal": None, "audio": None}]}, ["x"]),
    (user("a", "b"), ["a", "b"]),
    (user(), []),
    (user({"type": "text", "text": ""}), [""]),
    (user(IMAGE, IMAGE), ["image", "image"]),
    (user({"type": "image_url", "image_url": URL}), ["image"]),
    (user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}), ["audio"]),
    (user({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}), ["a"]),
    (user({"type": "refusal", "refusal": "no"}), ["no"]),
    (user({"type": "text", "text": "<image>"}, IMAGE), ["<image>", "image"]),
]
WRONG = [  # a body, and words of its error
    ({}, "needs 'messages'"),
    ({"messages": []}, "needs 'messages'"),
    ({"messages": ["x"]}, "message 0 must be an object, got str"),
    ({"messages": [{"content": "x"}]}, "message 0 has no 'role'"),
    ({"messages": [{"role": "user"}]}, "message 0 of role 'user' has no 'content'"),
    ({"messages": [{"role": "user", "content": 5}]}, "message 0: 'content' must be a text or a"),
    ({"messages": [{"role": "function", "name": "f", "content": "5"}]}, "use tool_calls and the"),
    ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "'tool_calls' must be a list"),
    (user({"type": "text"}), "messages[0].content[0]: a text part needs a 'text', got None"),
    (user({"type": "text", "text": ["a"]}), "messages[0].content[0]: a text part needs a 'text'"),
    (user(IMAGE, None), "messages[0].content[1]: Unknown content part type: None"),
    (user({"type": "image_url"}), "has no image"),
    (user({"type": "image_url", "image_url": None}), "has no image"),
    (
        user({"type": "input_audio", "input_audio": {"data": "AAAA"}}),
        "'format', got 'AAAA' and None",
    ),
    (user({"type": "image_url", "image_url": URL, "image": "b"}), "the part has 'image_url' and"),
]


@pytest.mark.parametrize(("body", "wanted"), GOOD, ids=str)
def test_odd_bodies_are_read(body, wanted):
    last = of_a_model().read(line_of(body)).messages[-1]
    found = [own.text if isinstance(own, TextPart) else own.item.kind for own in last.parts]
    assert found == wanted


@pytest.mark.parametrize(("body", "words"), WRONG, ids=str)
def test_wrong_bodies_say_what_is_wrong(body, words):
    with pytest.raises(RequestError) as refused:
        plain(line_of(body))
    assert words in str(refused.value)
