"""The types that plugins return and implement."""

import dataclasses
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmdeploy_llm.hooks import (
    Checkpoint,
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
    MediaRef,
    ModelSpec,
    ReasoningParser,
    ReasoningParserSpec,
    Segment,
)

VALUES = [
    ModelSpec(name="m", architectures=("M",), factory="a:b", tp_plan={"x": "rowwise"}),
    ReasoningParserSpec(name="p", factory="a:b"),
    MediaProcessorSpec(name="q", kind="image", factory="a:b"),
    MediaLimits(),
    MediaRef(kind="image", uri="x"),
    Segment(kind="content", text="x"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_are_frozen_keyword_only_and_survive_pickling(value):
    (first, *_) = dataclasses.fields(value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, first.name, "other")
    with pytest.raises(TypeError):
        type(value)("positional")
    assert not hasattr(value, "__dict__")
    assert pickle.loads(pickle.dumps(value)) == value


@pytest.mark.parametrize(
    ("config", "architecture"),
    [
        (SimpleNamespace(architectures=["A", "B"]), "A"),
        (SimpleNamespace(architectures=[]), ""),
        (SimpleNamespace(architectures=None), ""),
        (SimpleNamespace(), ""),
    ],
)
def test_architecture_of_a_checkpoint(config, architecture):
    assert Checkpoint(folder=Path(), config=config).architecture == architecture


class Halves(ReasoningParser):
    """Holds everything back until the end."""

    def __init__(self):
        self.text = ""

    def feed(self, text):
        self.text += text
        return [Segment(kind="reasoning", text="fed")]

    def finish(self):
        return [Segment(kind="content", text=self.text)]


def test_parse_is_feed_and_finish():
    parser = Halves()
    parser.start("any prompt")  # optional to override
    assert parser.parse("abc") == [
        Segment(kind="reasoning", text="fed"),
        Segment(kind="content", text="abc"),
    ]
    assert parser.markers == ()
    assert parser.start_marker is None
    assert parser.end_marker is None


@pytest.mark.parametrize("base", [ReasoningParser, MediaProcessor])
def test_bases_cannot_be_used_without_their_methods(base):
    with pytest.raises(TypeError, match="abstract"):
        base()
