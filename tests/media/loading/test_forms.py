"""All that handles prompts finds the same media in them, in the same order."""

import copy

import numpy as np
import pytest

from mmdeploy_llm.batch.items import ItemReader
from mmdeploy_llm.data.records.media import media_in
from mmdeploy_llm.engine.intake.chat import with_sources
from mmdeploy_llm.engine.intake.prompts import PromptReader, with_changed_media
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.values.params import SamplingParams

MEDIA = ModelMedia(known=("audio", "pdf"), part_types={"input_audio": "audio"})


class _Kinds:
    """A table of kinds without plugins, and with "pdf"."""

    kinds, parts = MEDIA.kinds, {}
    of_part = staticmethod(MEDIA.kind_of_part)

    @staticmethod
    def chat_part(part_type, model="*"):
        return None

    @staticmethod
    def of_name(name):
        return None


OF_BATCH = PromptReader.of_kinds(_Kinds())
SAMPLES = np.zeros(4, np.float32)
# Values of `multimodal_data`, and what the media in them are.
VALUES = [
    ({"image": "a.jpg"}, ["a.jpg"]),
    ({"image": ["a.jpg", b"bytes"], "video": "b.mp4"}, ["a.jpg", b"bytes", "b.mp4"]),
    ({"image": {"image": "a.jpg", "image_tokens": 64}}, ["a.jpg"]),
    ({"image": {"bytes": None, "path": "a.jpg"}}, ["a.jpg"]),
    ({"image": [{"bytes": b"bytes", "path": "a.jpg"}]}, [b"bytes"]),
    ({"image": [{"bytes": b"bytes"}, {"path": "a.jpg"}]}, [b"bytes", "a.jpg"]),  # of a table
    ({"audio": {"data": "AAAA", "format": "wav"}}, ["data:audio/wav;base64,AAAA"]),
    ({"audio": (SAMPLES, 16000)}, [(SAMPLES, 16000)]),
    ({"pdf": {"pdf": "a.pdf", "pages": "1-2"}}, ["a.pdf"]),
    ({"image": None}, []),
]
# Parts of a message, and what their media are.
PARTS = [
    ({"type": "image", "image": "a.jpg"}, "a.jpg"),
    ({"type": "image_url", "image_url": {"url": "a.jpg", "detail": "low"}}, "a.jpg"),
    ({"type": "image_url", "image_url": "a.jpg"}, "a.jpg"),
    ({"type": "image_url", "image": "a.jpg"}, "a.jpg"),
    ({"type": "image", "image_url": {"url": "a.jpg"}}, "a.jpg"),
    ({"type": "image", "url": "a.jpg"}, "a.jpg"),
    ({"type": "image", "path": "a.jpg"}, "a.jpg"),
    ({"type": "image", "image": b"bytes"}, b"bytes"),
    ({"type": "image", "image": {"bytes": b"bytes"}}, b"bytes"),  # a null path, in a table
    ({"type": "image", "image": {"image": "a.jpg", "image_tokens": 64}}, "a.jpg"),
    ({"type": "video", "video": "a.mp4", "fps": 2}, "a.mp4"),
    (
        {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
        "data:audio/wav;base64,AA",
    ),
    ({"type": "pdf", "pdf": "a.pdf", "pages": "1-2"}, "a.pdf"),
]


def plain(source):
    """A source of either reader: references as texts, data: URLs without their type."""
    if isinstance(source, list):
        return [plain(each) for each in source]
    own = source.uri if isinstance(source, MediaRef) else source
    return f"data:{own[own.index(';') :]}" if isinstance(own, str) and ";base64," in own else own


def in_intake(prompt):
    """The kinds and sources that the intake reads."""
    parts = PromptReader.of_model(MEDIA).read(prompt)
    items = parts.media if parts.messages is None else with_sources(parts.messages, parts.media)
    return [(item.kind, plain(item.source)) for item in items]


def agree(prompt, sources):
    """A batch, which knows no model, finds what the intake reads; the prompt is unchanged."""
    before = copy.deepcopy(prompt)
    found = [(own.kind, plain(own.source)) for own in OF_BATCH.read(prompt).items]
    assert [str(own) for own in found] == [str(own) for own in in_intake(prompt)]
    assert [str(source) for _, source in found] == [str(plain(source)) for source in sources]
    assert str(prompt) == str(before)


@pytest.mark.parametrize(("data", "sources"), VALUES)
def test_media_beside_a_text(data, sources):
    agree({"prompt": "x", "multimodal_data": data}, sources)
    agree({"prompt": "x", "multi_modal_data": data}, sources)


@pytest.mark.parametrize(("part", "source"), PARTS)
def test_media_in_a_message(part, source):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "image"}, part, part]},
    ]
    agree({"messages": messages}, [source, source])


@pytest.mark.parametrize(("part", "source"), PARTS)
def test_a_line_of_a_batch(part, source, tmp_path):
    """Paths are resolved wherever the intake finds them, and a tar gets the same media."""
    reader = ItemReader(str(tmp_path), SamplingParams(), kinds=_Kinds())
    item = reader.read(1, {"messages": [{"role": "user", "content": [part]}]})
    wanted = plain(source)
    if isinstance(wanted, str) and not wanted.startswith("data:"):
        wanted = str(tmp_path / wanted)
    assert [own for _, own in in_intake(item.prompt)] == [wanted]
    assert [plain(own) for own in media_in(item)] == [wanted]
    assert [own.kind for own in item.media] == [own.kind for own in item.prompt.items]
    assert item.media[0].pages == part.get("pages")


def test_items_are_changed_in_their_places():
    parts = [
        {"type": "image_url", "image_url": {"url": "c", "detail": "low"}},
        {"type": "image", "image": "d", "url": "d"},
        {"type": "image"},
        {"type": "video", "video": ["e", "f"], "fps": 2},
        {"type": "of a plugin"},
        "no part",
    ]
    prompt = {
        "multimodal_data": {"image": ["a", {"image": "b", "image_tokens": 64}]},
        "messages": [{"role": "user", "content": parts}, {"role": "user", "content": "a text"}],
    }
    seen = []

    def change(item):
        seen.append((item.source, dict(item.options)))
        return str(item.source).upper()

    read = OF_BATCH.read(prompt)
    made = with_changed_media(read, change)
    few = {"image_tokens": 64}
    every = {"fps": 2}
    assert seen == [("a", {}), ("b", few), ("c", {}), ("d", {}), ("e", every), ("f", every)]
    assert [plain(own.source) for own in made.items] == ["A", "B", "C", "D", ["E", "F"]]
    assert [own.options for own in made.items] == [own.options for own in read.items]
    *_, empty, _, plugins, wrong = made.messages[0].content
    assert (empty, plugins, wrong) == (read.messages[0].content[2], *read.messages[0].content[4:])
    assert made.messages[1] == read.messages[1]
