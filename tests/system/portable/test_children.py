"""Child processes with and without descriptors that they inherit."""

import os
import socket
import subprocess
import sys
import time

import pytest

from mmdeploy_llm.system.portable import children, signals

CHILD = """
import sys, threading
sys.modules["torch"] = None  # nothing of this needs it
from mmdeploy_llm.system.portable import children, signals
signals.ignore_endings()
if len(sys.argv) > 2:
    children.os = type("os", (), {**vars(children.os), "name": "nt"})
parent = children.Parent.found(sys.argv[-1])
threading.Thread(target=children.end_with, args=(parent,), daemon=True).start()
parent.peer.sendall(parent.peer.recv(5).upper())
parent.peer.recv(1)
threading.Event().wait(60)
"""


@pytest.fixture(params=["inherited", "connected"])
def child(request, monkeypatch, cold_children):
    """A child that answers once and then waits for its parent's end."""
    words = [sys.executable, "-c", CHILD]
    if request.param == "connected":
        words.append("nt")
    begin = children._start_inheriting if len(words) == 3 else children._start_connecting
    monkeypatch.setattr(children, "PARENT_CHECK_SECONDS", 0.2)
    started = begin(words, {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL})
    yield started
    started.process.kill()
    started.process.wait()
    started.peer.close()


def test_it_answers_and_ends_with_its_parent(child):
    child.peer.sendall(b"hello")
    child.peer.settimeout(60)
    assert child.peer.recv(5) == b"HELLO"
    with children.borrowed(child.peer.fileno()) as same:
        same.sendall(b"x")
    assert child.process.poll() is None
    os.close(child.lifeline)
    assert child.process.wait(60) == 1


def test_a_stranger_at_the_port_is_turned_away(monkeypatch):
    """Who cannot show the secret is not connected, and the child is."""
    monkeypatch.setattr(children, "PARENT_CHECK_SECONDS", 0.2)
    secret = b"s" * children.SECRET_BYTES
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with socket.create_server((children.LOOPBACK, 0)) as server:
        place = server.getsockname()
        strangers = [socket.create_connection(place) for _ in range(2)]
        strangers[0].sendall(b"x" * children.SECRET_BYTES)  # the other says nothing
        own = socket.create_connection(place)
        own.sendall(secret)
        peer = children._accepted(server, secret, process)
        assert peer.getpeername() == own.getsockname()
        process.kill()
        process.wait()
        ended = children._accepted(server, secret, process)
        assert ended.recv(1) == b""  # a child that died as it started
    for it in (*strangers, own, peer, ended):
        it.close()


def test_the_end_of_a_child_in_words():
    assert signals.end_of(-9) == "signal SIGKILL"
    assert signals.end_of(3) == "exit status 3"
    assert signals.end_of(-999) == "exit status -999"


def test_signals_that_a_system_does_not_have(monkeypatch):
    for name in ("pthread_sigmask", "SIG_BLOCK", "SIG_SETMASK"):
        monkeypatch.delattr(signals.signal, name)
    begin = time.monotonic()
    with signals.unheard_by_children():
        assert time.monotonic() - begin < 60


def test_a_pause_of_this_process_does_not_end_the_time_of_a_child(monkeypatch):
    """While a job is suspended for an hour, its children are, too."""
    ours, theirs = socket.socketpair()
    clock = iter([0.0, 3600.0, 3600.0, 3600.1])
    waits = iter([[], [ours]])
    monkeypatch.setattr(children, "wait", lambda peers, seconds: next(waits))
    monkeypatch.setattr(children.time, "monotonic", lambda: next(clock))
    with ours, theirs:
        assert children.left_after_waiting(ours, 10.0) == pytest.approx(10 - 10 / 20 - 0.1)


def test_a_child_has_its_time_and_no_more():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begin = time.monotonic()
        assert children.left_after_waiting(ours, 0.2) is None
        assert time.monotonic() - begin > 0.19
        theirs.sendall(b"x")
        assert 0 < children.left_after_waiting(ours, 60.0) <= 60


def test_waits_for_a_core_count_where_the_time_is_short(monkeypatch):
    """Otherwise a limit of a tenth of a millisecond would be as long as the machine is busy."""
    ours, theirs = socket.socketpair()
    clock = iter(range(1000))
    monkeypatch.setattr(children, "wait", lambda peers, seconds: [])
    monkeypatch.setattr(children.time, "monotonic", lambda: next(clock))
    with ours, theirs:
        assert children.left_after_waiting(ours, 1e-4) is None
    assert next(clock) == 2


def test_what_a_child_has_sent_counts_though_no_time_is_left(monkeypatch):
    """An answer that waits, or comes in the last part of the time, is no silence."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert children.left_after_waiting(ours, 0) is None
        theirs.sendall(b"x")
        assert children.left_after_waiting(ours, 0) == 0
        assert children.left_after_waiting(ours, -1.0) == 0
        waits = iter([*[[]] * (children.NUM_PARTS - 1), [ours]])
        clock = iter(range(1000))
        monkeypatch.setattr(children, "wait", lambda peers, seconds: next(waits))
        monkeypatch.setattr(children.time, "monotonic", lambda: next(clock))
        assert children.left_after_waiting(ours, 8.0) == pytest.approx(0, abs=1e-9)


def test_a_child_ends_with_its_parent(monkeypatch):
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
