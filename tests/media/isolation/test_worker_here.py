"""The process that decodes media, run in a thread of this one: what it answers to each outcome of a
call, and that it ends with its parent."""

import os
import socket
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mmdeploy_llm.errors import MediaLimitError
from mmdeploy_llm.media.isolation import worker
from mmdeploy_llm.media.isolation.wire import receive, send
from mmdeploy_llm.system.portable import children

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
def peer(monkeypatch, limits):
    """The parent's end of a worker's socket."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "end_with", lambda parent: None)
    monkeypatch.setattr(sys, "argv", ["worker", f"fd:{theirs.detach()}:0"])
    monkeypatch.setitem(sys.modules, "acme_decoder", SimpleNamespace(decode=decode))
    thread = threading.Thread(target=worker.main)
    thread.start()
    yield ours
    ours.close()
    thread.join(60)
    assert not thread.is_alive(), "it must end with its parent"


def answers(peer, outcome):
    call = {"function": "acme_decoder:decode", "max_memory": 2**30, "args": {"outcome": outcome}}
    send(peer, call, b"abc")
    found = []
    while not found or not {"done", "error"} & set(found[-1][0]):
        found.append(receive(peer, 2**20))
    return found


def test_every_outcome_is_one_last_message(peer, limits):
    first, second, last = answers(peer, "good")
    assert first == ({"fields": {"number": 0}, "shape": [1, 3]}, b"abc")
    assert second == ({"fields": {"number": 1}, "shape": None}, b"")
    assert last == ({"done": True}, b"")
    for outcome, error, message in (
        ("its own error", "MediaLimitError", "too long"),
        ("memory", "MediaLimitError", "decoding it needs more than the 1024 MiB"),
        ("a bug", "MediaError", "it cannot be decoded (KeyError while reading it)"),
    ):
        found = answers(peer, outcome)[-1][0]
        assert found["error"] == error
        assert found["message"].startswith(message)
        assert "secret" not in found["message"]
    assert limits == [2**30] * 4


def test_it_ends_when_its_parent_has_ended(monkeypatch):
    parents, ended = iter([7, 7, 1]), []
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(children, "PARENT_CHECK_SECONDS", 0.0)
    lifeline, kept = os.pipe()
    parent = children.Parent(peer=None, lifeline=lifeline, pid=7)
    children.end_with(parent)
    assert ended == [1]
    os.close(kept)
    monkeypatch.setattr(os, "getppid", lambda: 7)
    children.end_with(parent)  # the lifeline is closed
    assert ended == [1, 1]
    os.close(lifeline)
