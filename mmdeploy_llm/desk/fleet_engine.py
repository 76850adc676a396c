"""The process of one engine of a fleet, and the messages between it and the fleet."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import EngineError, MMDeployLLMError, RequestError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.outputs import RequestOutput
from mmdeploy_llm.parallel import Channel
from mmdeploy_llm.request import Request
from mmdeploy_llm.runtime_config import RuntimeConfig
from mmdeploy_llm.startup.start import start

from .drive import Driver
from .jobs import Job

if TYPE_CHECKING:
    from mmdeploy_llm.intake.intake import Intake


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call of an engine's intake, made in the engine's process."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, intake: Intake) -> Any:
        """Makes the call on `intake` and returns its result."""
        return getattr(intake, self.method)(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt for an engine. number: unique in the fleet."""

    number: int
    ask: Callable[..., tuple[Request, ...]]
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Tells an engine that nobody waits for these tasks any more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the intake; the engine replies with an Answer of the same number."""

    number: int
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a Call. error: the exception that it raised, None otherwise."""

    number: int
    value: Any
    error: MMDeployLLMError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Reports that the engine is loaded. num_ahead: tasks that it may hold at the same time."""

    runtime: RuntimeConfig
    num_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output of a task. error: the exception with which intake refused the prompt."""

    number: int
    output: RequestOutput
    error: MMDeployLLMError | None


def serve_engine(channel: Channel, *, config: EngineConfig) -> None:
    """Runs an engine in its process: receives tasks and sends outputs until the channel closes."""
    _Server(channel, config).serve()


class _Server:
    """Serves one engine in its process. One thread reads messages, another steps the engine."""

    def __init__(self, channel: Channel, config: EngineConfig) -> None:
        assembly = start(config)
        runtime = assembly.runtime
        self._engine, self._intake = assembly.engine, assembly.intake
        num_ahead = runtime.max_num_seqs + 2 * runtime.num_intake_threads
        self._driver = Driver(
            assembly.engine, num_threads=runtime.num_intake_threads, num_ahead=num_ahead
        )
        self._channel = channel
        self._lock = threading.Lock()  # held while sending
        self._tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._first: Task | None = None
        self._aborted: set[int] = set()
        self._requests: dict[int, tuple[str, ...]] = {}  # request ids, by number of the task
        self._send(Ready(runtime=runtime, num_ahead=num_ahead))

    def serve(self) -> None:
        """Runs tasks until the process ends. Raises WorkerDiedError when the engine has died."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            self._first = self._tasks.get()
            for item in self._driver.run(self):
                if self._engine.death is not None:
                    raise self._engine.death  # the fleet sends unfinished tasks to other engines
                error = item.error if isinstance(item.error, MMDeployLLMError) else None
                output = replace(item.output, prompt=None)
                self._send(Output(number=item.job.index, output=output, error=error))
                if output.finished:
                    self._requests.pop(item.job.index, None)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        """Returns the next task. StopIteration means that none is waiting now; more may come."""
        task, self._first = self._first, None
        if task is None:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                raise StopIteration from None
        accept = partial(self._accept, task)
        return Job(index=task.number, prompt=None, num_outputs=task.num_outputs, accept=accept)

    def _accept(self, task: Task) -> tuple[Request, ...]:
        if task.number in self._aborted:
            raise RequestError("aborted by the caller")
        requests = task.ask(self._intake)
        self._requests[task.number] = tuple(request.request_id for request in requests)
        return requests

    def _read(self) -> None:
        while True:
            try:
                message = self._channel.receive()
            except (EOFError, OSError):
                os._exit(0)  # the parent has ended, or has closed this engine
            if isinstance(message, Task):
                self._tasks.put(message)
            elif isinstance(message, Abort):
                self._aborted.update(message.numbers)
                ids = [one for number in message.numbers for one in self._requests.get(number, ())]
                self._engine.abort(ids)
            else:
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()

    def _answer(self, call: Call) -> None:
        try:
            answer = Answer(number=call.number, value=call.ask(self._intake))
        except MMDeployLLMError as error:
            answer = Answer(number=call.number, value=None, error=error)
        except Exception as error:  # raised by a plugin
            reported = EngineError(error_text(error))
            answer = Answer(number=call.number, value=None, error=reported)
        self._send(answer)

    def _send(self, value: Any) -> None:
        with self._lock:
            self._channel.send(value)
