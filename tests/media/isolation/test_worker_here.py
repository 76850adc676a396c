"""The function of the process that decodes media, run in a thread of this one: what it answers to
each outcome of a call."""

import json
import sys
import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import numpy as np
import pytest

from mmdeploy_llm.errors import MediaLimitError
from mmdeploy_llm.media.isolation import worker
from mmdeploy_llm.system.processes import Channel, frames
from mmdeploy_llm.system.processes.process import READY

OUTCOMES = {
    "good": None,
    "its own error": MediaLimitError("too long"),
    "memory": MemoryError(),
    "a bug": KeyError("/secret/path"),
}


def decode(blob, *, outcome):
    """Stands for the function of a plugin: yields fields and arrays."""
    yield {"number": 0}, np.frombuffer(blob, np.uint8).reshape(1, -1)
    if OUTCOMES[outcome] is not None:
        raise OUTCOMES[outcome]
    yield {"number": 1}, None


@pytest.fixture
def limits(monkeypatch):
    """The limits of memory that calls have set, which would hold for this process too."""
    found = []
    monkeypatch.setattr(worker, "set_limit", lambda _, value: found.append(value))
    return found


@pytest.fixture
def channel(monkeypatch, limits):
    """The parent's end of a worker's channel."""
    ours, theirs = Pipe()
    monkeypatch.setattr(worker, "drop_outputs", lambda: None)
    monkeypatch.setitem(sys.modules, "acme_decoder", SimpleNamespace(decode=decode))
    thread = threading.Thread(target=served, args=(Channel(theirs, 0),))
    thread.start()
    found = Channel(ours, 0)
    found.send(None)
    assert received(found).text == READY
    yield found
    ours.close()
    thread.join(60)
    assert not thread.is_alive(), "it must end with its parent"


def served(channel):
    with pytest.raises(EOFError):
        worker.serve(channel)


def received(channel):
    return frames.receive(channel.connection, seconds=60, max_buffer=2**20)


def answers(channel, outcome):
    """Returns (the fields, the array's bytes) of each pair, and the last frame's words."""
    call = {"function": "acme_decoder:decode", "file": None, "max_memory": 2**30}
    channel.send(({**call, "args": {"outcome": outcome}}, b"abc"))
    found = []
    while (frame := received(channel)).text:
        found.append((json.loads(frame.text), b"".join(frame.buffers)))
    return found, [json.loads(bytes(buffer)) for buffer in frame.buffers]


def test_every_outcome_is_one_last_frame(channel, limits):
    first, second = ({"number": number} for number in range(2))
    assert answers(channel, "good") == (
        [({"fields": first, "shape": [1, 3]}, b"abc"), ({"fields": second, "shape": None}, b"")],
        [],
    )
    for outcome, error, message in (
        ("its own error", "MediaLimitError", "too long"),
        ("memory", "MediaLimitError", "decoding it needs more than the 1024 MiB"),
        ("a bug", "MediaError", "it cannot be decoded (KeyError while reading it)"),
    ):
        [[found_error, found]] = answers(channel, outcome)[1]
        assert found_error == error
        assert found.startswith(message)
        assert "secret" not in found
    assert limits == [2**30] * 4
