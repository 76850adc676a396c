"""Lines become items: checked, with resolved paths and complete sampling parameters."""

import os

import pytest

from mmdeploy_llm.batch.items import ItemReader
from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.intake.prompts import (
    PromptReader,
    adapter_of,
    deadline_of,
    priority_of,
)
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.prompt import PromptParts

DEFAULTS = SamplingParams(max_tokens=9, temperature=0)
PARTS = [
    {"type": "image", "image": "a.jpg"},
    {"type": "image_url", "image_url": {"url": "sub/b.jpg", "detail": "low"}},
    {"type": "video", "video": {"video": "c.mp4", "fps": 2, "frames_sample": "leading"}},
    {"type": "text", "text": "What?"},
]


def read(values, folder="/data", **options):
    return ItemReader(folder, DEFAULTS, **options).read(5, values)


def sources(item):
    """The media of an item; references as texts."""
    found = [own.source for own in item.prompt.items]
    return [own.uri if isinstance(own, MediaRef) else own for own in found]


def test_a_line_without_id_has_its_number():
    item = read({"prompt": "hi"})
    values = {"prompt": PromptParts(text="hi"), "params": DEFAULTS, "question": "hi"}
    assert item == Item(line=5, id=5, digest=item.digest, **values)


def test_tools_go_with_the_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    item = read({"messages": [{"role": "user", "content": "hi"}], "tools": tools})
    assert item.prompt.tools == tools


def test_processor_options_go_with_the_prompt():
    item = read({"prompt": "hi", "mm_processor_kwargs": {"max_pixels": 9000}})
    assert item.prompt.processor_kwargs == {"max_pixels": 9000}


def test_a_template_goes_with_the_messages_but_not_the_name_of_a_file():
    line = {"messages": [{"role": "user", "content": "hi"}]}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert read({**line, "chat_template": template}).prompt.template == template
    for wrong in ("/etc/passwd", "a {b}\n.jinja", 5):
        item = read({**line, "chat_template": wrong})
        assert isinstance(item, BadItem)
        assert "must be a Jinja template itself" in item.message


def test_priority_and_timeout_go_with_the_prompt():
    prompt = read({"prompt": "hi", "priority": -1, "timeout": 5, "adapter": "a"}).prompt
    assert prompt == PromptParts(text="hi", priority=-1, timeout=5, adapter="a")
    assert (priority_of(prompt), adapter_of(prompt)) == (-1, "a")
    assert 4 < deadline_of(prompt).left <= 5


def test_media_paths_are_relative_to_the_folder():
    data = {"image": ["a.jpg", "/b.jpg", "https://x.org/c.jpg", "data:image/png;base64,AA"]}
    values = {"prompt": "hi", "multimodal_data": data}
    item = read(values)
    assert sources(item) == ["/data/a.jpg", *data["image"][1:]]
    assert [media.name for media in item.media] == [
        "/data/a.jpg",
        "/b.jpg",
        "https://x.org/c.jpg",
        "(data: URL)",
    ]
    assert values["multimodal_data"]["image"][0] == "a.jpg"


@pytest.mark.parametrize(
    "name",
    ["file:/data/x.jpg", "FILE:///x.jpg", "s3://bucket/x.jpg", "data:,x", "c:x.jpg", "a:b/c"],
)
def test_a_name_is_a_url_where_the_intake_reads_it_as_one(name):
    item = read({"prompt": "hi", "multimodal_data": {"image": name}})
    [found] = [media.source for media in item.prompt.media]
    is_url = bool(MediaRef(kind="image", uri=name).scheme)
    assert found.uri == (name if is_url else f"/data/{name}")
    assert item.media[0].is_file is not is_url


def test_media_in_messages_are_resolved_and_options_left_alone():
    item = read({"messages": [{"role": "user", "content": PARTS}]})
    assert sources(item) == ["/data/a.jpg", "/data/sub/b.jpg", "/data/c.mp4"]
    options = [own.options for own in item.prompt.items]
    assert options == [{}, {}, {"fps": 2, "frames_sample": "leading"}]
    assert item.media == (
        Media(kind="image", name="/data/a.jpg"),
        Media(kind="image", name="/data/sub/b.jpg"),
        Media(kind="video", name="/data/c.mp4"),
    )
    assert item.question == "What?"


def test_names_of_other_kinds_of_media_are_relative_to_the_folder_too(kinds_of):
    kinds = kinds_of({"kind": "chart"})
    rows = [["apples", 3], ["pears", 5]]
    line = {"prompt": "hi", "multimodal_data": {"chart": ["a.csv", rows, "/b.csv"]}}
    item = read(line, kinds=kinds)
    assert sources(item) == ["/data/a.csv", rows, "/b.csv"]
    parts = [{"type": "chart", "chart": "a.csv"}, {"type": "text", "text": "Which?"}]
    line = {"messages": [{"role": "user", "content": parts}]}
    assert sources(read(line, kinds=kinds)) == ["/data/a.csv"]
    unknown, text = read(line).prompt.messages[0].content  # the intake refuses it
    assert (unknown.part, text.text) == (parts[0], "Which?")


def test_objects_of_an_iterable_pass_as_they_are():
    blob = b"bytes"
    item = read({"prompt": "hi", "multi_modal_data": {"image": [blob, "a.jpg"]}}, folder=None)
    assert sources(item) == [blob, "a.jpg"]
    assert item.media[0].name == "(bytes)"
    assert item.media[1].name == os.path.abspath("a.jpg")


def test_sampling_parameters_fill_what_a_line_does_not_say():
    params = read({"prompt": "hi", "sampling_params": {"temperature": 0.5, "n": 2}}).params
    assert (params.temperature, params.max_tokens, params.n) == (0.5, 9, 2)
    own = SamplingParams(guided_decoding={"json": "{}"})
    params = read({"prompt": "hi", "sampling_params": own}).params
    assert params.guided_decoding is own.guided_decoding
    assert params.max_tokens == 9


def test_template_variables_fill_up_too_and_only_for_messages():
    values = {"messages": [{"role": "user", "content": "hi"}]}
    kwargs = {"template_kwargs": {"enable_thinking": True}}
    assert read(values, **kwargs).prompt.template_kwargs == {"enable_thinking": True}
    values["chat_template_kwargs"] = {"enable_thinking": False}
    assert read(values, **kwargs).prompt.template_kwargs == {"enable_thinking": False}
    assert read({"prompt": "hi"}, **kwargs).prompt.template_kwargs is None


@pytest.mark.parametrize(
    ("values", "item_id", "words"),
    [
        ([1], None, "must be a JSON object"),
        ({"id": True, "prompt": "x"}, None, "id must be a string"),
        ({"id": 1.5, "prompt": "x"}, None, "id must be a string"),
        ({"id": "", "prompt": "x"}, None, "id must be a string"),
        ({"id": "a", "promt": "x"}, "a", "did you mean 'prompt'"),
        ({"id": "a", "multimodal": {}}, "a", "did you mean"),
        ({"prompt": "x", "image": "a.jpg"}, 5, "did you mean 'multimodal_data', a dict such as"),
        ({"role": "user", "content": "x"}, 5, "a message is not a prompt"),
        ({"id": "a", "zzz": 1}, "a", "known: id, prompt"),
        ({"id": "a", "prompt": "x", "sampling_params": 3}, "a", "must be an object"),
        ({"id": "a", "prompt": "x", "sampling_params": {"topp": 1}}, "a", "'top_p'"),
        ({"id": "a", "prompt": "x", "sampling_params": {"temperature": "hot"}}, "a", "hot"),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1},
            5,
            "must be an object",
        ),
    ],
)
def test_a_bad_line_says_what_is_wrong(values, item_id, words):
    bad = read(values)
    assert isinstance(bad, BadItem)
    assert (bad.line, bad.id) == (5, item_id)
    assert words in bad.message


@pytest.mark.parametrize(
    "values",
    [
        {"messages": "text"},
        {"messages": []},
        {"messages": [3]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a", "url": "b"}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": "f"}]},
        {"prompt": 3},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [{"role": "user", "content": "x"}]},
        {"prompt": "x", "prompt_token_ids": [1]},
        {"prompt": "x", "multimodal_data": "x"},
        {"prompt": "x", "multimodal_data": {"image": [None]}},
        {"prompt": "x", "multimodal_data": {"sculpture": ["a"]}},
    ],
    ids=str,
)
def test_odd_shapes_have_the_words_of_the_intake(values):
    with pytest.raises(RequestError) as refused:
        PromptReader.of_model(ModelMedia(known=("audio",))).read(values)
    assert read(values).message == str(refused.value)


@pytest.mark.parametrize("part", [None, "text", {"type": ["image"]}, {"type": "of a plugin"}])
def test_a_part_that_needs_a_model_is_left_to_its_reader(part):
    prompt = read({"messages": [{"role": "user", "content": ["text", part]}]}).prompt
    assert prompt.messages[0].content[1].part == part
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\]: Unknown content part"):
        PromptReader.of_model(ModelMedia()).read(prompt)


def test_a_system_message_is_for_messages_wherever_they_stand():
    messages = [{"role": "user", "content": "hi"}]
    for line in ({"messages": messages}, {"prompt": messages}):
        found = read(line, system="Be brief.").prompt.messages
        assert [own.text for own in found] == ["Be brief.", "hi"]
    assert "a system message is for messages" in read({"prompt": "hi"}, system="x").message


@pytest.mark.parametrize("given", [0, "", [], False])
def test_template_variables_that_are_no_object_are_refused(given):
    messages = [{"role": "user", "content": "hi"}]
    found = read({"messages": messages, "chat_template_kwargs": given})
    assert "chat_template_kwargs must be an object" in found.message


def test_a_long_question_is_truncated():
    assert read({"prompt": "x" * 500}).question == "x" * 199 + "…"


def test_a_line_that_chooses_how_tokens_are_drawn_is_not_greedy():
    """A default temperature of 0 would leave its top_p without an effect."""
    reader = ItemReader(None, SamplingParams(temperature=0, max_tokens=9))
    for own, temperature in (
        ({"top_p": 0.9}, None),
        ({"top_p": 0.9, "temperature": 0}, 0),
        ({"max_tokens": 3}, 0),
    ):
        item = reader.read(1, {"prompt": "x", "sampling_params": own})
        assert item.params.temperature == temperature
    warm = ItemReader(None, SamplingParams(temperature=0.5))
    item = warm.read(1, {"prompt": "x", "sampling_params": {"top_p": 0.9}})
    assert item.params.temperature == 0.5
