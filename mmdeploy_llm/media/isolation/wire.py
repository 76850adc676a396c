"""Messages between a process and its workers: a JSON object followed by raw bytes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

HEADER = struct.Struct("!IQ")  # bytes of JSON, bytes after it
MAX_JSON = 64 * 2**20  # bytes; the frame times of a video are the largest JSON


class PeerGoneError(Exception):
    """The other process has closed the connection."""


def send(peer: socket.socket, fields: Mapping[str, Any], payload: Any = b"") -> None:
    """Sends one message. payload: bytes, or any C-contiguous buffer."""
    text = json.dumps(fields).encode()
    view = memoryview(payload).cast("B") if len(payload) else b""
    try:
        peer.sendall(HEADER.pack(len(text), len(view)) + text)
        if len(view):
            peer.sendall(view)
    except (BrokenPipeError, ConnectionResetError):
        raise PeerGoneError from None


def receive(peer: socket.socket, max_payload: int) -> tuple[dict[str, Any], bytearray]:
    """Returns the next message. Raises PeerGoneError, TimeoutError, and ValueError for a message
    that is too large or malformed."""
    num_json, num_payload = HEADER.unpack(_exactly(peer, HEADER.size))
    if num_json > MAX_JSON or num_payload > max_payload:
        raise ValueError("a message is larger than allowed")
    fields = json.loads(bytes(_exactly(peer, num_json)))
    if not isinstance(fields, dict):
        raise ValueError("a message is not a JSON object")
    return fields, _exactly(peer, num_payload)


def _exactly(peer: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            got = peer.recv_into(view[done:])
        except ConnectionResetError:
            raise PeerGoneError from None
        if not got:
            raise PeerGoneError
        done += got
    return data
