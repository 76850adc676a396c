"""Worker: a child process that runs one function and ends when its parent does.

    Worker(entry) --starts--> python: entry(channel)      channel: values, both ways
      tail        <--stderr-- the child's output, forwarded to this process's stderr
      lifeline    ----------> pipe that closes when this process ends for any reason; the child
                              then ends too

The parent's next `receive` raises the exception that ended the function. For a process that died it
raises WorkerDiedError, which reports the exit status and the last output.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from mmdeploy_llm.errors import ConfigError, MMDeployLLMError, ModelError, WorkerDiedError
from mmdeploy_llm.system.portable import children, signals

from . import frames
from .forks import finalize_here
from .wire import Message, receive

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mmdeploy_llm.system.processes.process import main; main()"
)
PACKAGE = "mmdeploy_llm"
TAIL_SIZE = 8000  # characters of a process's last output that are kept
NUM_LINES = 12  # lines of that output in an error message
CLOSE_SECONDS = 10.0
READY = b"ready"


class Channel:
    """One end of a connection between two processes. Not thread-safe."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.connection = connection
        self._pid = pid

    def send(self, value: Any) -> None:
        """Sends a value. Raises OSError when the other process has ended."""
        message = Message(value)
        try:
            self.send_message(message)
        finally:
            message.close()

    def send_message(self, message: Message) -> None:
        """Sends a value that is serialized already, such as once for several processes."""
        message.send(self.connection, self._pid)

    def receive(self) -> Any:
        """Waits for the next value. Raises EOFError or OSError when the other process has ended."""
        return receive(self.connection)

    def ready(self) -> None:
        """Sends that the child of a Helper takes jobs now."""
        frames.send(self.connection, READY)

    def answer(self, *answer: bytes) -> None:
        """Sends the last frame of the answer to a job, which is the whole of most answers."""
        frames.send(self.connection, b"", answer)


class _Failure:
    """The exception that ended the child's function, as sent to the parent."""

    def __init__(self, error: BaseException) -> None:
        self.error = error if isinstance(error, MMDeployLLMError) else None
        self.text = f"{type(error).__name__}: {error}"


class Worker:
    """A child process.

    name: its name in messages, such as "rank 1".
    entry: a picklable function that is called with the child's Channel; the process ends when it
        returns.
    """

    def __init__(
        self, name: str, entry: Callable[[Channel], None], *, is_quiet: bool = False
    ) -> None:
        """is_quiet: the child logs warnings only; otherwise it uses this process's log level."""
        self.name = name
        level = logging.WARNING if is_quiet else logging.getLogger(PACKAGE).getEffectiveLevel()
        stderr, child_stderr = os.pipe()
        arguments = [json.dumps(sys.path), os.getpid(), name, level]
        command = [sys.executable, "-c", BOOT, *map(str, arguments)]
        try:
            with open(child_stderr, "wb") as output:  # only the child keeps it open
                child = children.start(command, stdout=output, stderr=output)
        except BaseException:
            os.close(stderr)
            raise
        self._process, ours = child.process, Connection(child.peer.detach())
        self._tail = _Tail(stderr)
        self._channel = Channel(ours, self._process.pid)
        # Kills the process when the object is collected without a call of `close`.
        self._end = finalize_here(self, _end_process, self._process, ours, child.lifeline)
        with contextlib.suppress(OSError):  # `receive` reports a process that has already ended
            self._channel.send(entry)

    @property
    def connection(self) -> Connection:
        """The connection to wait on; readable when a value or the process's end can be received."""
        return self._channel.connection

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, value: Any) -> None:
        """Sends a value. Raises WorkerDiedError when the process has ended, and pickle's errors for
        an unsupported value."""
        message = Message(value)
        try:
            self.send_message(message)
        finally:
            message.close()

    def send_message(self, message: Message) -> None:
        """Sends a value that is serialized already. Raises WorkerDiedError when the process has
        ended."""
        try:
            self._channel.send_message(message)
        except OSError:
            self._raise_end()

    def receive(self) -> Any:
        """Waits for the next value. Re-raises an MMDeployLLMError that ended the child's function;
        raises WorkerDiedError for any other end."""
        try:
            value = self._channel.receive()
        except (EOFError, OSError):
            self._raise_end()
        except KeyboardInterrupt:
            self.kill()  # a message may have been read halfway, which breaks the channel
            raise
        if not isinstance(value, _Failure):
            return value
        if value.error is not None:
            raise value.error
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_SECONDS)
        raise WorkerDiedError(f"{self.name} failed: {value.text}{self._last_output()}")

    def receive_frame(self, seconds: float, max_buffer: int) -> frames.Frame:
        """Waits for the next frame, which is never unpickled. max_buffer: bytes of one buffer.
        Raises TimeoutError after `seconds`, and WorkerDiedError for the process's end and for what
        is no frame."""
        try:
            return frames.receive(self.connection, seconds=seconds, max_buffer=max_buffer)
        except TimeoutError:
            raise TimeoutError(f"{self.name} did not answer in time") from None
        except (EOFError, OSError):
            raise WorkerDiedError(self.ended_by()) from None
        except ValueError:
            raise WorkerDiedError(f"{self.name} sent an invalid answer") from None

    def hang_up(self) -> None:
        """Ends the conversation, which ends the process, also where forked processes hold copies of
        the connection. A thread that waits for the connection finds its end. May be called from any
        thread, and more than once."""
        with contextlib.suppress(OSError), children.borrowed(self.connection.fileno()) as it:
            it.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Hangs up, which ends the process; kills it after `seconds`."""
        self.hang_up()
        self._channel.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))
        self.kill()

    def kill(self) -> None:
        """Kills the process; does nothing when it has ended."""
        self._end()
        self._process.wait()

    def interrupt(self) -> None:
        """Kills the process and leaves the channel open, for a thread that waits on it: its
        `receive` then raises. May be called from any thread."""
        self._process.kill()

    def ended_by(self) -> str:
        """Returns how the process ended, killed if it has not: "it died with signal SIGSEGV"."""
        return f"{self.name} {self._ending()}"

    def _ending(self) -> str:
        try:
            return f"died with {signals.end_of(self._process.wait(CLOSE_SECONDS))}"
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its channel without ending"

    def _raise_end(self) -> Any:
        """Waits for the end of the process and raises WorkerDiedError."""
        ending = f"(process {self.pid}) {self._ending()}{self._last_output()}"
        raise WorkerDiedError(f"{self.name} {ending}") from None

    def _last_output(self) -> str:
        text = self._tail.text()
        lines = [line for line in text.splitlines() if line.strip()][-NUM_LINES:]
        return "; it wrote last:\n  " + "\n  ".join(lines) if lines else ""


def close_all(workers: Sequence[Worker]) -> None:
    """Closes all workers at once; kills those that have not ended after CLOSE_SECONDS."""
    for worker in workers:
        worker.hang_up()
    end = time.monotonic() + CLOSE_SECONDS
    for worker in workers:
        worker.close(end - time.monotonic())


class _Tail:
    """Forwards a process's output to this process's stderr, and keeps the last TAIL_SIZE
    characters."""

    def __init__(self, fd: int) -> None:
        self._text = ""
        self._thread = threading.Thread(target=self._read, args=(fd,), daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Returns the last output; complete once the process has ended."""
        self._thread.join(1.0)
        return self._text

    def _read(self, fd: int) -> None:
        with open(fd, "rb", buffering=0) as file:
            while chunk := file.read(2**16):
                text = chunk.decode(errors="replace")
                self._text = (self._text + text)[-TAIL_SIZE:]
                with contextlib.suppress(Exception):  # sys.stderr may be replaced by anything
                    sys.stderr.write(text)


def _end_process(process: subprocess.Popen[bytes], connection: Connection, lifeline: int) -> None:
    connection.close()
    process.kill()
    os.close(lifeline)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_SECONDS)


def main() -> None:
    """Runs the child process. sys.argv: "-c", sys.path as JSON, the parent's process id, the name,
    the log level, and the word by which the parent is found."""
    _, _, pid, name, level, word = sys.argv
    signals.ignore_endings()
    parent = children.Parent.found(word)
    threading.Thread(target=children.end_with, args=(parent,), daemon=True).start()
    logging.basicConfig(level=int(level), format=f"[{name}] %(levelname)s %(name)s: %(message)s")
    channel = Channel(Connection(parent.peer.detach()), int(pid))
    try:
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            channel.receive()(channel)
    except BaseException as error:
        if not isinstance(error, (ConfigError, ModelError)):  # wrong options: the parent tells them
            logging.getLogger(__name__).exception("%s failed", name)
        with contextlib.suppress(OSError):
            channel.send(_Failure(error))
        sys.stderr.flush()
        time.sleep(0.1)
        os._exit(1)  # does not wait for threads that hang in a collective
    os._exit(0)
