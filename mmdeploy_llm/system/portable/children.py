"""Child processes with a connection to them, which ends them when this process ends.

    start(command) --starts--> child: Parent.found(word), the last word of its command
      socket    <------------>  socket
      lifeline  ------------->  a pipe that closes when this process ends for any reason

Where a child inherits no descriptors (Windows), it connects to a port of this machine, and the pipe
is its standard input, which first gives it the secret that it shows there.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from .signals import unheard_by_children

SECRET_BYTES = 32
CONNECT_SECONDS = 60.0
PARENT_CHECK_SECONDS = 1.0
NUM_PARTS = 20  # of the time for an answer
LEAST_PART = 0.01  # seconds; a process waits as long for a core
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A started process. lifeline: the descriptor that keeps it alive; closed by its owner."""

    process: subprocess.Popen[bytes]
    peer: socket.socket
    lifeline: int


def start(command: list[str], **streams: Any) -> Child:
    """Starts a process, with one more word: what Parent.found wants. streams: stdout and stderr."""
    if os.name == "posix":
        return _start_inheriting(command, streams)
    return _start_connecting(command, streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The process that has started this one, as seen from here."""

    peer: socket.socket
    lifeline: int
    pid: int

    @classmethod
    def found(cls, word: str) -> Parent:
        """Connects with the parent."""
        kind, number, lifeline = word.split(":")
        if kind == "fd":
            peer = socket.socket(fileno=int(number))
            return cls(peer=peer, lifeline=int(lifeline), pid=os.getppid())
        secret = os.read(0, SECRET_BYTES)
        peer = socket.create_connection((LOOPBACK, int(number)), CONNECT_SECONDS)
        peer.sendall(secret)
        peer.settimeout(None)
        return cls(peer=peer, lifeline=0, pid=os.getppid())

    def wait_for_end(self) -> None:
        """Returns when the parent has ended or has closed the lifeline."""
        if os.name != "posix":
            with suppress(OSError):
                while os.read(self.lifeline, 1):
                    pass
            return
        # Also when a process that was forked from the parent keeps the lifeline open.
        while os.getppid() == self.pid:
            if select.select([self.lifeline], [], [], PARENT_CHECK_SECONDS)[0]:
                return


def _start_inheriting(command: list[str], streams: dict[str, Any]) -> Child:
    ours, theirs = socket.socketpair()
    lifeline, own = os.pipe()
    try:
        with theirs, open(lifeline, "rb"), unheard_by_children():
            process = subprocess.Popen(
                [*command, f"fd:{theirs.fileno()}:{lifeline}"],
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.DEVNULL,
                **streams,
            )
    except BaseException:
        os.close(own)
        ours.close()
        raise
    return Child(process=process, peer=ours, lifeline=own)


def _start_connecting(command: list[str], streams: dict[str, Any]) -> Child:
    secret = secrets.token_bytes(SECRET_BYTES)
    with socket.create_server((LOOPBACK, 0)) as server:
        process = subprocess.Popen(
            [*command, f"port:{server.getsockname()[1]}:0"],
            stdin=subprocess.PIPE,
            # Ctrl-C reaches all processes of a group.
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            **streams,
        )
        assert process.stdin is not None
        try:
            process.stdin.write(secret)
            process.stdin.flush()
            lifeline = os.dup(process.stdin.fileno())
            process.stdin.close()
            peer = _accepted(server, secret, process)
        except BaseException:
            process.kill()
            raise
    return Child(process=process, peer=peer, lifeline=lifeline)


def _accepted(
    server: socket.socket, secret: bytes, process: subprocess.Popen[bytes]
) -> socket.socket:
    """Returns the connection that shows the secret; others are closed. One that a process closed
    before it connected has an end at once."""
    server.settimeout(PARENT_CHECK_SECONDS)
    end = time.monotonic() + CONNECT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            peer, _ = server.accept()
        except TimeoutError:
            continue
        peer.settimeout(PARENT_CHECK_SECONDS)
        shown = b""
        with suppress(OSError):
            while len(shown) < SECRET_BYTES and (piece := peer.recv(SECRET_BYTES - len(shown))):
                shown += piece
        if hmac.compare_digest(shown, secret):
            peer.settimeout(None)
            return peer
        peer.close()
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours


def left_after_waiting(peer: socket.socket | Connection, seconds: float) -> float | None:
    """Waits until a child sends something or ends. Returns what is left of `seconds`, which may be
    0; None when nothing came. What waits already has come, however few seconds there are.

    Time in which this process does not run is not the child's fault: a job that is suspended and a
    container that is frozen stop both. So a look at the clock counts as a part at most.
    """
    left = max(0.0, seconds)
    part = max(left / NUM_PARTS, LEAST_PART)
    while True:
        begin = time.monotonic()
        has_come = wait([peer], min(left, part))
        left = max(0.0, left - min(time.monotonic() - begin, part))
        if has_come:
            return left
        if not left:
            return None


@contextmanager
def borrowed(number: int) -> Iterator[socket.socket]:
    """Gives the socket of a descriptor that somebody else closes."""
    it = socket.socket(fileno=number)
    try:
        yield it
    finally:
        it.detach()


def end_with(parent: Parent) -> None:
    """Ends this process when its parent has ended; for a thread."""
    parent.wait_for_end()
    os._exit(1)
