"""Messages from the child that reads tables: JSON, and the bytes of media outside of it.

    bytes of JSON, number of buffers | size of each buffer | JSON | buffers

Bytes, dates and the like stand in the JSON as {MARK: [kind, text]}. The mark is a secret of both
processes, so no row of a table can look like that.
"""

from __future__ import annotations

import datetime
import decimal
import json
import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from mmdeploy_llm.data.rows.rows import MARKS, MAX_MARKS

HEAD = struct.Struct("!II")
MAX_TEXT_BYTES = 64 * 2**20  # of the JSON of one row, as of a line of JSONL
WHOLE = getattr(socket, "MSG_WAITALL", 0)
SMALL_BYTES = 2**20  # buffers that are together smaller are sent as one


class TooLargeError(Exception):
    """A row is larger than allowed."""


class Encoder:
    """Turns rows into messages. max_cell: bytes of one buffer, such as an image."""

    def __init__(self, mark: str, max_cell: int) -> None:
        self._mark, self._max_cell = mark, max_cell

    def encode(self, fields: Mapping[str, Any]) -> tuple[bytes, list[Any]]:
        """Returns the JSON of a message, and its buffers. Raises TooLargeError, and RecursionError
        for values that are nested too deeply."""
        buffers: list[Any] = []

        def replaced(value: object) -> object:
            if isinstance(value, (bytes, bytearray, memoryview)):
                if len(value) > self._max_cell:
                    raise TooLargeError(
                        f"a cell has {len(value)} bytes, {self._max_cell} are allowed; leave it "
                        "out, or for media raise max_media_bytes"
                    )
                buffers.append(value)
                return {self._mark: ["bytes", len(buffers) - 1]}
            return {self._mark: _as_text(value)}

        text = json.dumps(fields, default=replaced)
        if len(text) > MAX_TEXT_BYTES:
            raise TooLargeError(f"its texts are longer than {MAX_TEXT_BYTES} bytes")
        if len(text) > MAX_MARKS and sum(map(text.count, MARKS)) > MAX_MARKS:
            raise TooLargeError(f"it has more than {MAX_MARKS} values")
        return text.encode(), buffers


def send(peer: socket.socket, message: tuple[bytes, list[Any]]) -> None:
    """Sends one message."""
    text, buffers = message
    sizes = array("Q", map(len, buffers))
    peer.sendall(HEAD.pack(len(text), len(sizes)) + sizes.tobytes() + text)
    for buffer in buffers if sum(sizes) > SMALL_BYTES else [b"".join(buffers)]:
        peer.sendall(buffer)


def receive(peer: socket.socket, mark: str, max_cell: int) -> dict[str, Any]:
    """Returns the fields of the next message. Raises EOFError when the other process has ended,
    ValueError for a message that is none."""
    num_text, num_buffers = HEAD.unpack(_exactly(peer, HEAD.size))
    if max(num_text, num_buffers) > MAX_TEXT_BYTES:
        raise ValueError("a message is larger than allowed")
    sizes = array("Q", _exactly(peer, 8 * num_buffers))
    if any(size > max_cell for size in sizes):
        raise ValueError("a buffer is larger than allowed")
    text = _exactly(peer, num_text)
    buffers = _buffers(peer, sizes)

    def restored(value: dict[str, Any]) -> Any:
        if mark not in value:
            return value
        kind, found = value[mark]
        return buffers[found] if kind == "bytes" else _of_text(kind, found)

    # A call for each object is what most of the time goes to, so only where there is something.
    hook = restored if mark.encode() in text else None
    fields = json.loads(text, object_hook=hook)
    if not isinstance(fields, dict):
        raise ValueError("a message is not an object")
    return fields


def _buffers(peer: socket.socket, sizes: Sequence[int]) -> list[bytes]:
    if sum(sizes) > SMALL_BYTES:
        return [_exactly(peer, size) for size in sizes]
    whole, begin, found = _exactly(peer, sum(sizes)), 0, []
    for size in sizes:
        found.append(whole[begin : begin + size])
        begin += size
    return found


def _exactly(peer: socket.socket, size: int) -> bytes:
    data = peer.recv(size, WHOLE) if size else b""
    if len(data) == size:
        return data
    pieces, missing = [data], size - len(data)  # it was interrupted, or it is the end
    while missing:
        if not pieces[-1]:
            raise EOFError
        pieces.append(peer.recv(missing, WHOLE))
        missing -= len(pieces[-1])
    return b"".join(pieces)


def _as_text(value: object) -> list[str]:
    """Returns the kind and text of a value that JSON does not have."""
    if isinstance(value, datetime.datetime):
        return ["datetime", value.isoformat()]
    if isinstance(value, datetime.date):
        return ["date", value.isoformat()]
    if isinstance(value, datetime.time):
        return ["time", value.isoformat()]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", f"{value.days} {value.seconds} {value.microseconds}"]
    if isinstance(value, decimal.Decimal):
        return ["decimal", str(value)]
    return ["text", str(value)]


def _of_text(kind: str, text: str) -> Any:
    match kind:
        case "datetime":
            return datetime.datetime.fromisoformat(text)
        case "date":
            return datetime.date.fromisoformat(text)
        case "time":
            return datetime.time.fromisoformat(text)
        case "timedelta":
            days, seconds, microseconds = map(int, text.split())
            return datetime.timedelta(days, seconds, microseconds)
        case "decimal":
            return decimal.Decimal(text)
    return text
