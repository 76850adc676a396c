"""Lines become items: checked, with resolved paths and complete sampling parameters."""

import os

import pytest

from mmdeploy_llm.batch.items import ItemReader
from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.media.loading.forms import media_items
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.values.params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=9, temperature=0)
PARTS = [
    {"type": "image", "image": "a.jpg"},
    {"type": "image_url", "image_url": {"url": "sub/b.jpg", "detail": "low"}},
    {"type": "video", "video": {"video": "c.mp4", "fps": 2, "frames_sample": "leading"}},
    {"type": "text", "text": "What?"},
]


def read(values, folder="/data", **options):
    return ItemReader(folder, DEFAULTS, **options).read(5, values)


def test_a_line_without_id_has_its_number():
    item = read({"prompt": "hi"})
    values = {"prompt": {"prompt": "hi"}, "params": DEFAULTS, "question": "hi"}
    assert item == Item(line=5, id=5, digest=item.digest, **values)


def test_tools_go_with_the_prompt():
    tools = [{"type": "function", "function": {"name": "f"}}]
    item = read({"messages": [{"role": "user", "content": "hi"}], "tools": tools})
    assert item.prompt["tools"] == tools


def test_processor_options_go_with_the_prompt():
    item = read({"prompt": "hi", "mm_processor_kwargs": {"max_pixels": 9000}})
    assert item.prompt["mm_processor_kwargs"] == {"max_pixels": 9000}


def test_a_template_goes_with_the_messages_but_not_the_name_of_a_file():
    line = {"messages": [{"role": "user", "content": "hi"}]}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert read({**line, "chat_template": template}).prompt["chat_template"] == template
    for wrong in ("/etc/passwd", "a {b}\n.jinja", 5):
        item = read({**line, "chat_template": wrong})
        assert isinstance(item, BadItem)
        assert "must be a Jinja template itself" in item.message


def test_priority_and_timeout_go_with_the_prompt():
    assert read({"prompt": "hi", "priority": -1, "timeout": 5}).prompt == {
        "prompt": "hi",
        "priority": -1,
        "timeout": 5,
    }


def test_media_paths_are_relative_to_the_folder():
    data = {"image": ["a.jpg", "/b.jpg", "https://x.org/c.jpg", "data:image/png;base64,AA"]}
    values = {"prompt": "hi", "multimodal_data": data}
    item = read(values)
    assert item.prompt["multimodal_data"]["image"] == ["/data/a.jpg", *data["image"][1:]]
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
    [found] = [media.source for media in media_items(item.prompt["multimodal_data"])]
    is_url = bool(MediaRef(kind="image", uri=name).scheme)
    assert found.uri == (name if is_url else f"/data/{name}")
    assert item.media[0].is_file is not is_url


def test_media_in_messages_are_resolved_and_options_left_alone():
    item = read({"messages": [{"role": "user", "content": PARTS}]})
    content = item.prompt["messages"][0]["content"]
    assert content[0]["image"] == "/data/a.jpg"
    assert content[1]["image_url"] == {"url": "/data/sub/b.jpg", "detail": "low"}
    assert content[2]["video"] == {"video": "/data/c.mp4", "fps": 2, "frames_sample": "leading"}
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
    assert item.prompt["multimodal_data"]["chart"] == ["/data/a.csv", rows, "/b.csv"]
    parts = [{"type": "chart", "chart": "a.csv"}, {"type": "text", "text": "Which?"}]
    line = {"messages": [{"role": "user", "content": parts}]}
    content = read(line, kinds=kinds).prompt["messages"]
    assert content[0]["content"] == [{"type": "chart", "chart": "/data/a.csv"}, parts[1]]
    assert read(line).prompt["messages"][0]["content"] == parts  # unknown: the intake refuses it


def test_objects_of_an_iterable_pass_as_they_are():
    blob = b"bytes"
    item = read({"prompt": "hi", "multi_modal_data": {"image": [blob, "a.jpg"]}}, folder=None)
    assert item.prompt["multi_modal_data"]["image"] == [blob, "a.jpg"]
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
    assert read(values, **kwargs).prompt["chat_template_kwargs"] == {"enable_thinking": True}
    values["chat_template_kwargs"] = {"enable_thinking": False}
    assert read(values, **kwargs).prompt["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in read({"prompt": "hi"}, **kwargs).prompt


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
        ({"id": "a", "messages": [], "chat_template_kwargs": 1}, "a", "must be an object"),
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
        {"messages": [3, {"content": [None, {"type": "image"}, {"type": ["image"]}]}]},
        {"prompt": 3, "multimodal_data": "x"},
        {"prompt": "x", "multimodal_data": {"audio": ["a"], "image": [[{"url": None}], None]}},
    ],
)
def test_odd_shapes_are_left_for_the_intake_to_refuse(values):
    assert isinstance(read(values), Item)


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
