"""The parts of OpenAI's interfaces become texts and media, in chats and in lines alike."""

import pytest
from mmdeploy_llm_plugins.chat_parts import provide_chat_parts

from mmdeploy_llm.batch.items import ItemReader
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.testing import ChatPartConformance, ChatPartExample, PluginConformance
from mmdeploy_llm.values.params import SamplingParams

TEXT, REFUSAL, IMAGE, FILE = provide_chat_parts()
PDF_DATA = "data:application/pdf;base64,JVBERi0="


class TestPlugin(PluginConformance):
    plugin = "mmdeploy_llm_plugins.chat_parts"


class TestText(ChatPartConformance):
    spec = TEXT
    examples = (
        ChatPartExample(part={"type": "input_text", "text": "Hi"}, expected=("Hi",)),
        ChatPartExample(
            part={"type": "output_text", "text": "A.", "annotations": []}, expected=("A.",)
        ),
    )
    wrong = ({"type": "input_text"}, {"type": "input_text", "text": None})


class TestRefusal(ChatPartConformance):
    spec = REFUSAL
    examples = (ChatPartExample(part={"type": "refusal", "refusal": "No."}, expected=("No.",)),)
    wrong = ({"type": "refusal", "text": "x"},)


class TestImage(ChatPartConformance):
    spec = IMAGE
    examples = (
        ChatPartExample(
            part={"type": "input_image", "image_url": "a.png", "detail": "auto"},
            expected=({"type": "image", "image": "a.png"},),
        ),
        ChatPartExample(
            part={"type": "input_image", "image_url": {"url": "b.png"}},
            expected=({"type": "image", "image": "b.png"},),
        ),
        ChatPartExample(
            part={"type": "image_pil", "image_pil": b"PNG"},
            expected=({"type": "image", "image": b"PNG"},),
        ),
    )
    wrong = ({"type": "input_image", "file_id": "f"}, {"type": "image_pil"})


class TestFile(ChatPartConformance):
    spec = FILE
    examples = (
        ChatPartExample(
            part={"type": "file", "file": {"filename": "a.PDF", "file_data": PDF_DATA}},
            expected=({"type": "pdf", "pdf": PDF_DATA},),
        ),
        ChatPartExample(
            part={"type": "file", "file": {"file_data": PDF_DATA}},
            expected=({"type": "pdf", "pdf": PDF_DATA},),
        ),
        ChatPartExample(
            part={"type": "input_file", "filename": "a.pdf", "file_data": "JVBERi0="},
            expected=({"type": "pdf", "pdf": "data:;base64,JVBERi0="},),
        ),
        ChatPartExample(
            part={"type": "input_file", "file_url": "https://a.org/b.pdf?c"},
            expected=({"type": "pdf", "pdf": "https://a.org/b.pdf?c"},),
        ),
        ChatPartExample(
            part={"type": "input_file", "file_url": "https://a.org/b.wav"},
            expected=({"type": "audio", "audio": "https://a.org/b.wav"},),
        ),
    )
    wrong = (
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "file", "file": "f"},
        {"type": "file"},
        {"type": "input_file", "file_data": "AA", "filename": "a.doc"},
        {"type": "input_file", "file_data": "data:"},
    )


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_image", "file_id": "f"}, "content[1]: input_image has no URL; files that"),
        ({"type": "file", "file": {"file_id": "f"}}, "files that were uploaded are not here"),
        ({"type": "file", "file": "f"}, "content[1].file: must be an object, got 'f'"),
        ({"type": "input_file", "file_data": "A", "filename": "a.doc"}, "'a.doc' is of no kind"),
    ],
)
def test_a_wrong_part_of_a_line_is_its_error(part, words):
    reader = ItemReader(None, SamplingParams(), kinds=PluginManager.load().kinds)
    content = [{"type": "text", "text": "x"}, part]
    found = reader.read(1, {"messages": [{"role": "user", "content": content}]})
    assert isinstance(found, BadItem)
    assert words in found.message


def test_media_of_a_line_have_names_and_paths(tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    reader = ItemReader(str(tmp_path), SamplingParams(), kinds=PluginManager.load().kinds)
    content = [{"type": "input_image", "image_url": "a.png"}, {"type": "input_text", "text": "?"}]
    item = reader.read(1, {"messages": [{"role": "user", "content": content}]})
    path = str(tmp_path / "a.png")
    image, text = item.prompt.messages[0].content
    assert (image.item.kind, image.item.source.uri, text.text) == ("image", path, "?")
    assert [(own.kind, own.name) for own in item.media] == [("image", path)]
