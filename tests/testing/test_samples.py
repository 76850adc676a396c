"""What a spec names as its samples is tried by `plugins check`, and what is none is told."""

import sys
from types import SimpleNamespace

import pytest

from mmdeploy_llm.hooks import ChatPartSpec
from mmdeploy_llm.model_checks.base import CheckFailed
from mmdeploy_llm.plugin_checks.chat_parts import ChatPartSubject
from mmdeploy_llm.plugin_checks.samples import samples_of

GOOD = {"examples": [({"type": "place"}, ["here"])], "wrong": ({"type": "place", "x": 1},)}
UNKNOWN = {"exampels": []}
NO_PAIRS = {"examples": [{"type": "place"}]}


def subject(name):
    named = None if name is None else f"acme_samples:{name}"
    return ChatPartSubject.of(
        ChatPartSpec(name="place", types=("place",), factory="json:loads", samples=named), ()
    )


def test_samples_are_the_attributes_of_the_kit(monkeypatch):
    named = {"GOOD": GOOD, "UNKNOWN": UNKNOWN, "NO_PAIRS": NO_PAIRS}
    monkeypatch.setitem(sys.modules, "acme_samples", SimpleNamespace(**named))
    made = subject("GOOD")
    assert [own.expected for own in made.examples] == [["here"]]
    assert made.wrong == GOOD["wrong"]
    assert (subject(None).examples, subject(None).wrong) == ([], ())
    for name, message in (("UNKNOWN", "exampels"), ("NO_PAIRS", "see ChatPartConformance")):
        with pytest.raises(CheckFailed, match=message):
            subject(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("json:loads", "are a function"), ("json:nothing", "importing"), ("nowhere:X", "importing")],
)
def test_what_is_no_dict_is_told(name, message):
    with pytest.raises(CheckFailed, match=message):
        samples_of(name)
