"""Fleet: several engines behind one LLM (data parallel), each in a process of its own.

    jobs --> Fleet --prompt--> engine 0: intake, steps, delivery   (ranks of its own, if it has any)
                   --prompt--> engine 1: ...
             <------ outputs, in the order in which they come

A prompt goes, unopened, to the engine with the fewest in work; each has a bounded number ahead.
What an engine had in work when it died is tried once more by another one. A prompt whose second
engine dies, or that has given output already, ends in error; the other engines go on.

Ctrl-C comes between messages: what has been sent or received is known here, and the engines are
told that nobody waits for it. A second one does not wait for a message that does not end; the
engine at its other end is given up.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from .assembly import assemble
from .config import EngineConfig
from .drive import Driver, Job, JobOutput, refused
from .errors import EngineError, MMDeployLLMError, RequestError, WorkerDiedError
from .hooks import PluginManager
from .hooks.names import error_text
from .outputs import RequestOutput
from .parallel import Channel, Message, Worker, close_all, interrupted_later
from .request import Request
from .runner.parts import engine_configs, load_kernels
from .runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from .intake.intake import Intake

logger = logging.getLogger(__name__)

MAX_TRIES = 2  # engines that may die of one prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A call of an engine's intake, to be made where that is."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, intake: Intake) -> Any:
        """Makes it."""
        return getattr(intake, self.method)(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A prompt for an engine. number: of all of the fleet's."""

    number: int
    ask: Callable[..., tuple[Request, ...]]
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abort:
    """These tasks are wanted no more."""

    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A question about the intake; answered by an _Answer of the same number."""

    number: int
    ask: Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    number: int
    value: Any
    error: MMDeployLLMError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """num_ahead: tasks that the engine has use for at the same time."""

    runtime: RuntimeConfig
    num_ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    number: int
    output: RequestOutput
    error: MMDeployLLMError | None


@dataclass(slots=True, eq=False)
class _Run:
    """One call of `Fleet.run`. num_sent: its tasks that have not ended."""

    ready: deque[JobOutput] = field(default_factory=deque)
    num_sent: int = 0


@dataclass(slots=True, eq=False)
class _Sent:
    """A task in an engine's work. run: None once nobody waits for it. ended: samples that are
    there."""

    job: Job
    run: _Run | None
    num_tries: int = 1
    has_output: bool = False
    ended: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine as the fleet sees it."""

    worker: Worker
    num_ahead: int = 0
    sent: dict[int, _Sent] = field(default_factory=dict)
    death: WorkerDiedError | None = None

    @property
    def num_free(self) -> int:
        """Tasks it has room for."""
        return self.num_ahead - len(self.sent)


class Fleet:
    """Runs jobs as Driver does; a job's `accept` is an Ask. plugins: as they are loaded in this
    process too. runtime: of each engine, as resolved by the first."""

    def __init__(self, config: EngineConfig) -> None:
        """Returns when all engines are ready. Raises as `assemble`, and WorkerDiedError."""
        self.plugins = PluginManager.load(config.plugins, config.blocked_plugins)
        load_kernels(config)  # built once, not by all engines at the same time
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._answers: dict[int, _Answer | None] = {}  # to calls; None until it is there
        self._is_closed = False
        self._engines: list[_Engine] = []
        try:
            for index, part in enumerate(engine_configs(config)):
                entry = partial(serve_engine, config=part)
                worker = Worker(f"engine {index}", entry, is_quiet=index > 0)
                self._engines.append(_Engine(worker=worker))
            ready: list[_Ready] = [engine.worker.receive() for engine in self._engines]
        except BaseException:
            for engine in self._engines:
                engine.worker.kill()
            raise
        for engine, own in zip(self._engines, ready, strict=True):
            engine.num_ahead = own.num_ahead
        self.runtime = ready[0].runtime

    def run(self, jobs: Iterable[Job]) -> Generator[JobOutput, None, None]:
        """See Driver.run. WorkerDiedError is raised when no engine is left."""
        run, source, is_open = _Run(), iter(jobs), True
        try:
            while True:
                is_open = is_open and self._fill(run, source)
                while run.ready:
                    yield run.ready.popleft()
                if not run.num_sent and not is_open:
                    break
                # Without anything in work: all room is taken by what nobody waits for any more.
                self._pump(partial(self._can_go_on, run, is_open))
            self.check()
        finally:
            self._abandon(run)

    def _can_go_on(self, run: _Run, is_open: bool) -> bool:
        return bool(run.ready) or (is_open and self._num_free() > 0)

    def _num_free(self) -> int:
        """Tasks that the engine with the most room has room for."""
        return max((engine.num_free for engine in self._living()), default=0)

    def check(self) -> None:
        """Raises WorkerDiedError when no engine is left."""
        deaths = [engine.death for engine in self._engines]
        if not self._is_closed and all(deaths):
            raise WorkerDiedError(f"no engine is left; the last one: {deaths[-1]}")

    def ask(self, method: str, *args: Any) -> list[Any]:
        """What `method` of each engine's intake gives. Raises what it raises."""
        return self._asked(self._living(), Ask(method=method, args=args))

    def ask_one(self, method: str, *args: Any) -> Any:
        """What `method` of one engine's intake gives. Raises what it raises."""
        while True:
            self.check()
            found = self._asked(self._living()[:1], Ask(method=method, args=args))
            if found:
                return found[0]

    def _asked(self, engines: list[_Engine], ask: Ask) -> list[Any]:
        """The answers; none of an engine that dies."""
        if self._is_closed:
            raise EngineError("this LLM is closed; make a new one")
        found = []
        for engine in engines:
            answer = self._answer_of(engine, ask)
            if answer is not None and answer.error is not None:
                raise answer.error
            found += [] if answer is None else [answer.value]
        return found

    def _answer_of(self, engine: _Engine, ask: Ask) -> _Answer | None:
        number = next(self._numbers)
        message = Message(_Call(number=number, ask=ask))
        self._answers[number] = None
        try:
            with self._lock, interrupted_later():
                self._deliver(engine, message)
            is_enough = partial(self._is_answered, engine, number)
            while not is_enough():
                self._pump(is_enough)
        finally:
            answer = self._answers.pop(number)
        return answer

    def _is_answered(self, engine: _Engine, number: int) -> bool:
        return self._answers[number] is not None or engine.death is not None

    def close(self) -> None:
        """Ends all engines; later calls of `run` raise EngineError."""
        self._is_closed = True
        close_all([engine.worker for engine in self._engines])

    def _living(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.death is None]

    def _fill(self, run: _Run, source: Iterator[Job]) -> bool:
        """Takes jobs while an engine has room; False when no more will be taken."""
        if self._is_closed:
            raise EngineError("this LLM is closed; make a new one")
        while self._living():
            with self._lock:
                num_free = self._num_free()
            if num_free <= 0 or len(run.ready) >= self._engines[0].num_ahead:
                return True
            job = next(source, None)
            if job is None:
                return False
            with self._lock, interrupted_later():
                run.num_sent += 1
                self._send(_Sent(job=job, run=run))
        return False

    def _send(self, sent: _Sent) -> None:
        """To the engine with the most room."""
        task = _Task(
            number=next(self._numbers), ask=sent.job.accept, num_outputs=sent.job.num_outputs
        )
        try:
            message = Message(task)
        except Exception as error:  # pickle raises whatever the objects raise
            reason = (
                "with data_parallel_size > 1 a prompt goes to another process, and this one cannot "
                f"({error_text(error)}); give texts, paths, bytes, images or arrays"
            )
            self._fail(sent, RequestError(reason))
            return
        engines = self._living()
        if not engines:
            self._fail(sent, next(e.death for e in self._engines if e.death is not None))
            return
        engine = max(engines, key=lambda engine: engine.num_free)
        engine.sent[task.number] = sent
        self._deliver(engine, message)

    def _deliver(self, engine: _Engine, message: Message) -> None:
        try:
            engine.worker.send_message(message)
        except WorkerDiedError as death:
            self._lose(engine, death)
        except KeyboardInterrupt:
            self._give_up(engine)
            raise
        finally:
            message.close()

    def _pump(self, is_enough: Callable[[], bool]) -> None:
        """Takes what the engines have said; waits for the first."""
        with self._lock:
            if is_enough():
                return
            engines = {engine.worker.connection: engine for engine in self._living()}
            for link in wait(list(engines)):
                with interrupted_later():
                    self._receive(engines[link])  # type: ignore[index]

    def _receive(self, engine: _Engine) -> None:
        try:
            self._take(engine, engine.worker.receive())
        except MMDeployLLMError as error:
            self._lose(engine, error)
        except KeyboardInterrupt:
            self._give_up(engine)
            raise

    def _give_up(self, engine: _Engine) -> None:
        """Half a message has come or gone."""
        self._lose(engine, WorkerDiedError("the engine was ended by two interrupts"))

    def _take(self, engine: _Engine, said: Any) -> None:
        if isinstance(said, _Answer):
            if said.number in self._answers:  # else nobody waits for it any more
                self._answers[said.number] = said
            return
        sent = engine.sent[said.number]
        sent.has_output = True
        if said.output.finished:
            sent.ended.add(said.output.outputs.index)
        if len(sent.ended) == sent.job.num_outputs:
            del engine.sent[said.number]
        output = replace(said.output, prompt=sent.job.prompt)
        self._give(sent, JobOutput(job=sent.job, output=output, error=said.error))

    def _give(self, sent: _Sent, item: JobOutput) -> None:
        if sent.run is None:
            return
        sent.run.ready.append(item)
        if len(sent.ended) == sent.job.num_outputs:
            sent.run.num_sent -= 1
            sent.run = None

    def _fail(self, sent: _Sent, error: Exception) -> None:
        """Error outputs for what has not ended of a task."""
        for item in refused(sent.job, error):
            if item.output.outputs.index not in sent.ended:
                sent.ended.add(item.output.outputs.index)
                self._give(sent, item)

    def _lose(self, engine: _Engine, error: MMDeployLLMError) -> None:
        """An engine is gone: its tasks are tried again where that can be done, once."""
        if engine.death is not None:
            return
        engine.death = death = WorkerDiedError(str(error))
        engine.worker.kill()
        lost, engine.sent = list(engine.sent.values()), {}
        logger.error("an engine is gone, with %d prompts in work: %s", len(lost), error)
        for sent in lost:
            if sent.run is None:
                continue
            if sent.has_output or sent.num_tries == MAX_TRIES:
                self._fail(sent, death)
            else:
                sent.num_tries += 1
                self._send(sent)

    def _abandon(self, run: _Run) -> None:
        """Nobody waits any more: the engines are told, and what comes yet is dropped."""
        with self._lock, interrupted_later():
            for engine in self._living():
                numbers = [number for number, sent in engine.sent.items() if sent.run is run]
                for number in numbers:
                    engine.sent[number].run = None
                if numbers and not self._is_closed:
                    self._deliver(engine, Message(_Abort(numbers=tuple(numbers))))


def serve_engine(channel: Channel, *, config: EngineConfig) -> None:
    """An engine's process: tasks in, outputs out, until the channel ends."""
    _Server(channel, config).serve()


class _Server:
    """The engine in its process: one thread reads what comes, one steps."""

    def __init__(self, channel: Channel, config: EngineConfig) -> None:
        assembly = assemble(config)
        runtime = assembly.runtime
        self._engine, self._intake = assembly.engine, assembly.intake
        num_ahead = runtime.max_num_seqs + 2 * runtime.num_intake_threads
        self._driver = Driver(
            assembly.engine, num_threads=runtime.num_intake_threads, num_ahead=num_ahead
        )
        self._channel = channel
        self._lock = threading.Lock()  # of sending
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._first: _Task | None = None
        self._aborted: set[int] = set()
        self._requests: dict[int, tuple[str, ...]] = {}  # by task
        self._send(_Ready(runtime=runtime, num_ahead=num_ahead))

    def serve(self) -> None:
        """Raises WorkerDiedError when the engine cannot go on."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            self._first = self._tasks.get()
            for item in self._driver.run(self):
                if self._engine.death is not None:
                    raise self._engine.death  # what is in work is tried elsewhere
                error = item.error if isinstance(item.error, MMDeployLLMError) else None
                output = replace(item.output, prompt=None)
                self._send(_Output(number=item.job.index, output=output, error=error))
                if output.finished:
                    self._requests.pop(item.job.index, None)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        """The next task that is there; StopIteration is not the end, but that none is now."""
        task, self._first = self._first, None
        if task is None:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                raise StopIteration from None
        accept = partial(self._accept, task)
        return Job(index=task.number, prompt=None, num_outputs=task.num_outputs, accept=accept)

    def _accept(self, task: _Task) -> tuple[Request, ...]:
        if task.number in self._aborted:
            raise RequestError("aborted by the caller")
        requests = task.ask(self._intake)
        self._requests[task.number] = tuple(request.request_id for request in requests)
        return requests

    def _read(self) -> None:
        while True:
            try:
                said = self._channel.receive()
            except (EOFError, OSError):
                os._exit(0)  # the parent is gone, or closes us
            if isinstance(said, _Task):
                self._tasks.put(said)
            elif isinstance(said, _Abort):
                self._aborted.update(said.numbers)
                ids = [one for number in said.numbers for one in self._requests.get(number, ())]
                self._engine.abort(ids)
            else:
                threading.Thread(target=self._answer, args=(said,), daemon=True).start()

    def _answer(self, call: _Call) -> None:
        try:
            answer = _Answer(number=call.number, value=call.ask(self._intake))
        except MMDeployLLMError as error:
            answer = _Answer(number=call.number, value=None, error=error)
        except Exception as error:  # a plugin's
            told = EngineError(error_text(error))
            answer = _Answer(number=call.number, value=None, error=told)
        self._send(answer)

    def _send(self, value: Any) -> None:
        with self._lock:
            self._channel.send(value)
