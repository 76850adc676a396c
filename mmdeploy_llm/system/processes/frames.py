"""Frames of a text and buffers, in which a child answers that computes with strangers' bytes. They
are never unpickled.

    bytes of the text, number of buffers | bytes of each buffer | text | buffers
"""

from __future__ import annotations

import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from mmdeploy_llm.system.portable.children import borrowed, left_after_waiting

HEAD = struct.Struct("!II")
MAX_TEXT = 64 * 2**20  # bytes; the frame times of a video, and the rows of a table, are the longest
SMALL = 2**20  # buffers that are together smaller are sent as one
AT_ONCE = getattr(socket, "MSG_DONTWAIT", 0)  # what is there already needs no look at the clock
REST_SECONDS = 0.1  # for the rest of a frame that began to come in the last moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A received frame. buffers: writable; together they may share memory. seconds_left: of those
    that were allowed."""

    text: bytes
    buffers: Sequence[memoryview]
    seconds_left: float


def send(connection: Connection, text: bytes, buffers: Sequence[Any] = ()) -> None:
    """Sends one frame. buffers: C-contiguous ones of bytes. Raises OSError when the other process
    has ended."""
    views = [memoryview(buffer).cast("B") if len(buffer) else memoryview(b"") for buffer in buffers]
    sizes = array("Q", (view.nbytes for view in views))
    with borrowed(connection.fileno()) as peer:
        peer.sendall(HEAD.pack(len(text), len(sizes)) + sizes.tobytes() + text)
        for view in views if sum(sizes) > SMALL else [b"".join(views)]:
            peer.sendall(view)


def receive(connection: Connection, *, seconds: float, max_buffer: int) -> Frame:
    """Waits for the next frame. max_buffer: bytes of one buffer.

    Raises TimeoutError after `seconds`, EOFError when the other process has ended, and ValueError
    for what is no frame or larger than allowed.
    """
    with borrowed(connection.fileno()) as peer:
        return _received(_Reader(peer, seconds), max_buffer)


def _received(reader: _Reader, max_buffer: int) -> Frame:
    num_text, num_buffers = HEAD.unpack(reader.exactly(HEAD.size))
    if max(num_text, num_buffers) > MAX_TEXT:
        raise ValueError("a frame is larger than allowed")
    sizes = array("Q", bytes(reader.exactly(8 * num_buffers)))
    if any(size > max_buffer for size in sizes):
        raise ValueError("a buffer is larger than allowed")
    text = bytes(reader.exactly(num_text))
    if sum(sizes) > SMALL:
        buffers = [reader.exactly(size) for size in sizes]
    else:
        whole, begin, buffers = reader.exactly(sum(sizes)), 0, []
        for size in sizes:
            buffers.append(whole[begin : begin + size])
            begin += size
    return Frame(text=text, buffers=buffers, seconds_left=reader.left)


class _Reader:
    """Reads a socket for at most so many seconds, whoever sends slowly or stops in a frame.

    left: of these seconds. What is waited counts, and what receiving takes.
    """

    def __init__(self, peer: socket.socket, seconds: float) -> None:
        self._peer, self.left = peer, seconds
        self._has_begun = False

    def exactly(self, size: int) -> memoryview:
        """Returns the next `size` bytes."""
        whole, done = memoryview(bytearray(size)), 0
        while done < size:
            begin, left = time.monotonic(), self.left
            done += self._some(whole[done:])
            if self.left == left:  # nothing was waited for
                self.left = max(0.0, left - (time.monotonic() - begin))
        self._has_begun = True
        return whole

    def _some(self, view: memoryview) -> int:
        if not AT_ONCE:
            self._wait()
        while True:
            try:
                got = self._peer.recv_into(view, 0, AT_ONCE)
            except BlockingIOError:
                self._wait()
            except ConnectionError:
                raise EOFError from None
            else:
                if not got:
                    raise EOFError
                return got

    def _wait(self) -> None:
        allowed = max(self.left, REST_SECONDS) if self._has_begun else self.left
        left = left_after_waiting(self._peer, allowed)
        if left is None:
            raise TimeoutError
        self.left = min(left, self.left)
