"""A conversation with two images, from end to end: as transformers answers, and what breaks it."""

from dataclasses import replace

import pytest
from mmdeploy_llm_plugins.qwen.image import QwenImageProcessor
from mmdeploy_llm_plugins.transformers_media.sound.processor import AnyAudioProcessor

from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.layers.grid_lm import GridLM
from mmdeploy_llm.testing import fake_manager
from mmdeploy_llm.testing.media.chats import ChatAnswer, a_chat_equals_the_reference
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped
from mmdeploy_llm.testing.models.models import ModelSubject, transformers_reference
from mmdeploy_llm.testing.models.prompts import make_prompt
from mmdeploy_llm.weights.folder import read_checkpoint

SPECS = {spec.name: spec for spec in PluginManager.load().models}


@pytest.fixture(scope="module")
def subject_for(tiny_folder):
    def make(family="qwen2_vl", **fields):
        folder = tiny_folder(family)
        made = ModelSubject(
            spec=SPECS[family],
            folder=folder,
            config=read_checkpoint(folder).config,
            cases={},
            tolerance=1e-4,
            make_prompt=make_prompt,
            make_reference=transformers_reference,
        )
        return replace(made, **fields)

    return make


@pytest.mark.full
def test_the_built_in_model_answers_as_transformers(subject_for):
    a_chat_equals_the_reference(subject_for())


@pytest.mark.full
def test_pictures_in_another_order(subject_for, monkeypatch):
    encode = GridLM.encode_media
    monkeypatch.setattr(GridLM, "encode_media", lambda self, items: encode(self, items)[::-1])
    with pytest.raises(CheckFailed, match=r"the answer of a conversation .* differ from index"):
        a_chat_equals_the_reference(subject_for())


@pytest.mark.full
def test_positions_of_text_after_a_picture(subject_for, monkeypatch):
    positions = GridLM.positions

    def changed(self, num_tokens, media):
        found = positions(self, num_tokens, media)
        found[:, media[-1].end if media else 0 :] += 3
        return found

    monkeypatch.setattr(GridLM, "positions", changed)
    with pytest.raises(CheckFailed, match=r"the answer of a conversation"):
        a_chat_equals_the_reference(subject_for())


@pytest.mark.full
def test_an_item_that_is_not_read(subject_for, monkeypatch):
    def broken(self, item, options):
        raise RuntimeError("no such mode")

    monkeypatch.setattr(QwenImageProcessor, "process", broken)
    with pytest.raises(CheckFailed, match=r"answers with an error: .*no such mode"):
        a_chat_equals_the_reference(subject_for())


@pytest.mark.full
def test_a_prompt_of_other_tokens(subject_for):
    """The tokens are compared with a reference of the author's own."""
    asked = []

    def ask(folder, messages, num_tokens):
        asked.append([part["type"] for part in messages[0]["content"]])
        return ChatAnswer(prompt_ids=[1, 2], token_ids=[3] * num_tokens)

    with pytest.raises(CheckFailed, match=r"prompt of a conversation .* the reference 2"):
        a_chat_equals_the_reference(subject_for(chat_reference=ask))
    assert asked == [["text", "image", "text", "image", "text"]]


@pytest.mark.full  # a model of three towers, in two engines
def test_half_a_sound(subject_for, monkeypatch):
    """Two images and a sound are asked about in one conversation."""
    subject = subject_for("qwen2_5_omni")
    assert a_chat_equals_the_reference(subject) is None
    prepare = AnyAudioProcessor.prepare

    def halved(self, content, settings):
        return prepare(self, content[len(content) // 2 :].copy(), settings)

    monkeypatch.setattr(AnyAudioProcessor, "prepare", halved)
    with pytest.raises(CheckFailed, match="the prompt of a conversation has"):
        a_chat_equals_the_reference(subject)


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen2", {}, "reads no media: nothing to add"),
        ("qwen2_vl", {"factory": "a:B"}, r"'mmdeploy_llm_plugins.qwen.*, not 'a:B'; install your"),
        ("ernie4_5_vl_moe", {}, "cannot be asked .*; give its tokens yourself: add `chat_ref"),
    ],
)
def test_what_cannot_be_compared_says_what_to_add(subject_for, family, fields, reason):
    subject = subject_for(family)
    with pytest.raises(CheckSkipped, match=reason):
        a_chat_equals_the_reference(replace(subject, spec=replace(subject.spec, **fields)))


def test_a_checkpoint_that_nobody_serves(subject_for, monkeypatch):
    subject = subject_for()
    monkeypatch.setattr(PluginManager, "load", lambda: fake_manager())
    with pytest.raises(CheckSkipped, match=r"no installed plugin serves .*pip install -e"):
        a_chat_equals_the_reference(subject)
