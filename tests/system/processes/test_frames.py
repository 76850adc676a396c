"""Frames arrive whole, within their time, and what is none is refused before memory is taken."""

import socket
import threading
import time
from multiprocessing.connection import Connection

import numpy as np
import pytest

from mmdeploy_llm.system.processes import frames


@pytest.fixture
def ends():
    ours, theirs = (Connection(peer.detach()) for peer in socket.socketpair())
    yield ours, theirs
    for end in (ours, theirs):
        if not end.closed:
            end.close()


@pytest.fixture(params=[frames.AT_ONCE, 0], ids=["posix", "elsewhere"])
def flags(monkeypatch, request):
    monkeypatch.setattr(frames, "AT_ONCE", request.param)


def sent(connection, *frame):
    thread = threading.Thread(target=frames.send, args=(connection, *frame))
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("text", "buffers"),
    [
        (b"", []),
        (b"text", []),
        (b"", [b"one"]),
        (b"text", [b"", b"two", b""]),
        (b"x" * 3_000_000, [np.arange(12, dtype=np.uint8).reshape(3, 4)]),
        (b"x", [bytes([number]) * size for number, size in enumerate((0, 1, 2**20, 3 * 2**20))]),
    ],
)
def test_a_frame_arrives_as_it_was_sent(ends, flags, text, buffers):
    ours, theirs = ends
    thread = sent(theirs, text, buffers)
    frame = frames.receive(ours, seconds=60, max_buffer=2**22)
    thread.join()
    assert frame.text == text
    assert [bytes(buffer) for buffer in frame.buffers] == [bytes(buffer) for buffer in buffers]
    assert all(not buffer.readonly for buffer in frame.buffers)
    assert 0 < frame.seconds_left <= 60


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (frames.HEAD.pack(2**31, 0), "a frame is larger"),
        (frames.HEAD.pack(0, 2**31), "a frame is larger"),
        (frames.HEAD.pack(0, 1) + (2**40).to_bytes(8, "little"), "a buffer is larger"),
        (b"\xff" * 8, "a frame is larger"),
    ],
)
def test_a_size_that_is_not_allowed(ends, flags, head, message):
    ours, theirs = ends
    with socket.socket(fileno=theirs.fileno()) as peer:
        peer.sendall(head)
        peer.detach()
    with pytest.raises(ValueError, match=message):
        frames.receive(ours, seconds=60, max_buffer=2**20)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("size", [0, 3, 11])
def test_one_that_stops_or_ends_within_a_frame(ends, flags, size):
    ours, theirs = ends
    with socket.socket(fileno=theirs.fileno()) as peer:
        peer.sendall((frames.HEAD.pack(8, 0) + b"12345678")[:size])
        peer.detach()
    with pytest.raises(TimeoutError):
        frames.receive(ours, seconds=0.05, max_buffer=0)
    theirs.close()
    with pytest.raises(EOFError):
        frames.receive(ours, seconds=60, max_buffer=0)


def test_what_has_come_is_received_when_no_time_is_left(ends, flags):
    ours, theirs = ends
    frames.send(theirs, b"text", [b"buffer"])
    time.sleep(0.01)
    frame = frames.receive(ours, seconds=0.0, max_buffer=6)
    assert (frame.text, frame.seconds_left) == (b"text", 0.0)
