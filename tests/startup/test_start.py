"""What `start` leaves over when the engine cannot be started."""

from types import SimpleNamespace

import pytest

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.media_loading.kinds import ModelMedia
from mmdeploy_llm.startup import start as starting


def test_processors_are_closed_when_the_weights_cannot_be_read(monkeypatch):
    """They are built first, and may hold processes."""
    closed = []
    processor = SimpleNamespace(close=lambda: closed.append("image"))

    def fails(*_):
        raise CheckpointError("a file is missing")

    media = ModelMedia(processors={"image": processor})
    monkeypatch.setattr(starting, "build_media", lambda *_: media)
    monkeypatch.setattr(starting, "build_computer", fails)
    with pytest.raises(CheckpointError, match="a file is missing"):
        starting.start(EngineConfig(model="shapes-vl"))
    assert closed == ["image"]
