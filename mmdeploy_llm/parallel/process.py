"""Worker: a process of ours that runs one function, and ends when we do.

    Worker(entry) --starts--> python: entry(channel)      channel: values, both ways
      tail        <--stderr-- what it writes, passed on
      lifeline    ----------> closed when this process ends, however it ends: the child ends too

An exception that the function raises reaches whoever receives next; a process that is gone is a
WorkerDiedError that says how it ended and what it wrote last.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from mmdeploy_llm.errors import MMDeployLLMError, WorkerDiedError

from .wire import Message, receive

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mmdeploy_llm.parallel.process import main; main()"
)
PACKAGE = "mmdeploy_llm"
TAIL_SIZE = 8000  # characters of what a process wrote last
NUM_LINES = 12  # of them, in a message
CLOSE_SECONDS = 10.0
PARENT_CHECK_SECONDS = 1.0


class Channel:
    """One end of the connection between two processes. For one thread at each end."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.connection = connection
        self._pid = pid

    def send(self, value: Any) -> None:
        """Raises OSError when the other side is gone."""
        message = Message(value)
        try:
            self.send_message(message)
        finally:
            message.close()

    def send_message(self, message: Message) -> None:
        """As `send`, for a value that goes to several."""
        message.send(self.connection, self._pid)

    def receive(self) -> Any:
        """The next value. Raises EOFError or OSError when the other side is gone."""
        return receive(self.connection)


class _Failure:
    """What the function raised, as sent to the parent."""

    def __init__(self, error: BaseException) -> None:
        self.error = error if isinstance(error, MMDeployLLMError) else None
        self.text = f"{type(error).__name__}: {error}"


class Worker:
    """A child process. name: in messages, such as "rank 1". entry: a picklable function that gets
    the child's Channel; the process ends when it returns."""

    def __init__(
        self, name: str, entry: Callable[[Channel], None], *, is_quiet: bool = False
    ) -> None:
        """is_quiet: it logs warnings only; else what this process logs."""
        self.name = name
        level = logging.WARNING if is_quiet else logging.getLogger(PACKAGE).getEffectiveLevel()
        ours, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        stderr, child_stderr = os.pipe()
        arguments = [json.dumps(sys.path), theirs.fileno(), lifeline, os.getpid(), name, level]
        with theirs, contextlib.ExitStack() as unused:
            for fd in (stderr, self._lifeline):
                unused.callback(os.close, fd)
            unused.callback(ours.close)
            with open(lifeline, "rb"), open(child_stderr, "wb"):  # closed here, open in the child
                self._process = subprocess.Popen(
                    [sys.executable, "-c", BOOT, *map(str, arguments)],
                    pass_fds=(theirs.fileno(), lifeline),
                    stdin=subprocess.DEVNULL,
                    stdout=child_stderr,
                    stderr=child_stderr,
                )
            unused.pop_all()
        self._tail = _Tail(stderr)
        self._channel = Channel(ours, self._process.pid)
        # Also without `close` no process outlives the object.
        self._end = weakref.finalize(self, _end_process, self._process, ours, self._lifeline)
        with contextlib.suppress(OSError):  # a process that is gone already is told by `receive`
            self._channel.send(entry)

    @property
    def connection(self) -> Connection:
        """To wait on: readable when there is something to receive, the end included."""
        return self._channel.connection

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, value: Any) -> None:
        """Raises WorkerDiedError; what pickle raises for a value that it does not take."""
        message = Message(value)
        try:
            self.send_message(message)
        finally:
            message.close()

    def send_message(self, message: Message) -> None:
        """As `send`, for a value that goes to several."""
        try:
            self._channel.send_message(message)
        except OSError:
            self._raise_end()

    def receive(self) -> Any:
        """The next value. Raises what the child's function raised, where it is an error of ours,
        and WorkerDiedError."""
        try:
            value = self._channel.receive()
        except (EOFError, OSError):
            self._raise_end()
        except KeyboardInterrupt:
            self.kill()  # half a message may have been read
            raise
        if not isinstance(value, _Failure):
            return value
        if value.error is not None:
            raise value.error
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        raise WorkerDiedError(f"{self.name} failed: {value.text}{self._last_words()}")

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Asks the process to end, waits so long, then kills it."""
        self._channel.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        self.kill()

    def kill(self) -> None:
        """Ends it at once; one that has ended stays as it is."""
        self._end()
        self._process.wait()

    def _raise_end(self) -> Any:
        """Raises WorkerDiedError, once the process is gone."""
        try:
            status = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise WorkerDiedError(f"{self.name} hung up{self._last_words()}") from None
        raise WorkerDiedError(
            f"{self.name} (process {self.pid}) died with {_how(status)}{self._last_words()}"
        ) from None

    def _last_words(self) -> str:
        text = self._tail.text()
        lines = [line for line in text.splitlines() if line.strip()][-NUM_LINES:]
        return "; it wrote nothing" if not lines else "; it wrote last:\n  " + "\n  ".join(lines)


def close_all(workers: Sequence[Worker]) -> None:
    """Closes them at the same time, so that many take no longer than one."""
    for worker in workers:
        worker.connection.close()
    end = time.monotonic() + CLOSE_SECONDS
    for worker in workers:
        worker.close(end - time.monotonic())


class _Tail:
    """Passes on what a process writes, and remembers the last of it."""

    def __init__(self, fd: int) -> None:
        self._text = ""
        self._thread = threading.Thread(target=self._read, args=(fd,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """What it wrote last; all of it once the process has ended."""
        self._thread.join(1.0)
        return self._text

    def _read(self, fd: int) -> None:
        with open(fd, "rb", buffering=0) as file:
            while chunk := file.read(2**16):
                text = chunk.decode(errors="replace")
                self._text = (self._text + text)[-TAIL_SIZE:]
                with contextlib.suppress(Exception):  # of whatever stands in sys.stderr's place
                    sys.stderr.write(text)


def _how(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def _end_process(process: subprocess.Popen[bytes], connection: Connection, lifeline: int) -> None:
    connection.close()
    process.kill()
    os.close(lifeline)


def main() -> None:
    """The child: BOOT, sys.path, then file numbers, the parent's process, name and log level."""
    connection, lifeline, parent = (int(text) for text in sys.argv[2:5])
    name, level = sys.argv[5], int(sys.argv[6])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends us
    threading.Thread(target=_end_with, args=(lifeline, parent), daemon=True).start()
    logging.basicConfig(level=level, format=f"[{name}] %(levelname)s %(name)s: %(message)s")
    channel = Channel(Connection(connection), parent)
    try:
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            channel.receive()(channel)
    except BaseException as error:
        logging.getLogger(__name__).exception("%s ends", name)
        with contextlib.suppress(OSError):
            channel.send(_Failure(error))
        sys.stderr.flush()
        time.sleep(0.1)
        os._exit(1)  # threads of collectives that never end must not hold it up
    os._exit(0)


def _end_with(lifeline: int, parent: int) -> None:
    """Ends this process as soon as the parent is gone."""
    while os.getppid() == parent:
        if select.select([lifeline], [], [], PARENT_CHECK_SECONDS)[0]:
            break
    os._exit(1)
