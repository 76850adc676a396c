"""Messages: what is accepted, what templates see."""

import copy

import pytest

from mmdeploy_llm.engine.intake.chat import with_harmless_texts
from mmdeploy_llm.engine.intake.parts import part_for
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.media.loading.kinds import ModelMedia

ERNIE = "{% if part.type == 'image_url' %}"
QWEN = "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
PLAIN = "{% if part.type == 'image' %}"


def read(messages, where=""):
    """The messages as typed values."""
    return PromptReader.of_model(ModelMedia()).read({"messages": messages}, where=where).messages


def media(messages):
    """The media of the messages."""
    return [part.item for message in read(messages) for part in message.parts]


def harmless(messages, template=ERNIE):
    """The messages with the texts of markers broken."""
    return with_harmless_texts(read(messages), (), ("<|pad|>", "<|pad|>x"), template)


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("part", "source", "options"),
    [
        ({"type": "image_url", "image_url": {"url": "a"}}, "a", {}),
        ({"type": "image_url", "image_url": {"url": "a", "detail": "high"}}, "a", {}),
        ({"type": "image_url", "image_url": "a"}, "a", {}),
        ({"type": "image", "image": b"a"}, b"a", {}),
        ({"type": "image", "image": {"url": "a"}}, "a", {}),
        ({"type": "image", "url": "a"}, "a", {}),
        ({"type": "image_url", "image": "a", "uuid": "5"}, "a", {}),
        ({"type": "image", "image": "a", "min_pixels": 5}, "a", {"min_pixels": 5}),
        ({"type": "image"}, None, {}),
    ],
    ids=str,
)
def test_forms_of_media_parts(part, source, options):
    (item,) = media(user(part))
    own = getattr(item.source, "uri", item.source)
    assert (item.kind, own, item.options) == ("image", source, options)


def test_video_parts():
    (item,) = media(user({"type": "video_url", "video_url": {"url": "a"}, "fps": 2}))
    assert (item.kind, item.source.uri, item.options) == ("video", "a", {"fps": 2})


@pytest.mark.parametrize(("template", "expected"), [(ERNIE, "image_url"), (PLAIN, "image")])
def test_templates_find_media_by_type_or_by_key(template, expected):
    seen = part_for("image", template)
    assert seen == {"type": expected, "image": "image", "image_url": {"url": "image"}}


def test_qwens_test_for_videos_finds_them_by_key():
    seen = part_for("video", QWEN)
    assert seen["type"] == "video"
    assert "video" in seen


def test_a_template_finds_a_kind_by_its_other_types():
    template = "{% if part.type == 'input_audio' %}"
    assert part_for("audio", template, ("input_audio",))["type"] == "input_audio"
    assert part_for("audio", template)["type"] == "audio"


def test_a_part_has_its_media_once():
    same = {"type": "image", "image": "a", "image_url": "a"}
    assert media(user(same))[0].source.uri == "a"
    both = {"type": "image", "image": "a", "image_url": {"url": "b"}}
    with pytest.raises(RequestError, match=r"content\[0\]: the part has 'image' and 'image_url'"):
        read(user(both))


def test_a_refusal_is_what_an_assistant_has_said():
    """OpenAI's answers have it in place of the content (API reference, chat message object)."""
    said = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
    (message,) = read([said])
    assert message.text == "I cannot help with that."
    (message,) = read([{**said, "content": "Yes.", "refusal": None}])
    assert message.text == "Yes."


def test_media_of_no_value_beside_the_content_are_none():
    (message,) = read([{"role": "user", "content": "x", "images": [], "image": None}])
    assert message.text == "x"


def test_other_fields_are_copied():
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "n": 3}]},
        {"role": "tool", "content": "5", "name": "f"},
    ]
    seen = read(messages)
    assert [{**own.fields, "content": own.content} for own in seen] == messages
    assert seen[0].fields["tool_calls"] is not messages[0]["tool_calls"]


def test_the_mark_breaks_every_marker_and_is_free():
    messages = [
        {"role": "user", "content": "a <|pad|> b \ue000"},
        {"role": "tool", "content": "x", "args": {"deep": ["<|pad|>x"]}},
    ]
    before = copy.deepcopy(messages)
    conversation = harmless(messages, template="\ue001")
    assert conversation.mark == "\ue002"
    assert conversation.messages[0].content == "a <\ue002|pad|> b \ue000"
    assert conversation.messages[1].fields["args"] == {"deep": ["<\ue002|pad|>x"]}
    assert messages == before
    assert harmless([{"role": "user", "content": "plain"}]).mark == ""


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("text", "must be a list of message dicts, got str"),
        ({"role": "user"}, "got dict"),
        ([], "must not be empty"),
        (["text"], r"message 0 must be a dict .*'text'"),
        ([{"content": "x"}], "message 0 has no 'role'"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 .* no 'content'"),
        ([{"role": 5, "content": "x"}], "message 0: 'role' must be a text, got 5"),
        ([{"role": "user", "content": 5}], "message 0: 'content' must be .* got int"),
        (user("text"), r"; write \{\"type\": \"text\", .* or \{\"type\": \"image\""),
        (user("text"), r"messages\[0\].content\[0\]: Unknown content part type: 'text'"),
        (user({"text": "x"}), "Unknown content part type: None"),
        (
            user({"type": "text", "text": "x"}, {"type": "audio"}),
            r"content\[1\]: Unknown content part type: 'audio'; known: text, image_url, video_url",
        ),
        (user({"type": "text"}), "needs a 'text', got None"),
        (
            [{"role": "user", "content": "x", "images": ["aGk="]}],  # as Ollama writes it
            "message 0 of role 'user': 'images' is not read there; give a part .* each image",
        ),
        (user({"type": "text", "text": "x", "image_url": {"url": "a"}}), "'image_url' is not read"),
    ],
    ids=str,
)
def test_wrong_messages(messages, message):
    """Each message of an error begins with the conversation, where the caller gave several."""
    with pytest.raises(RequestError, match=message):
        read(messages)
    with pytest.raises(RequestError, match=f"^conversation 3, .*{message}"):
        read(messages, where="conversation 3, ")
