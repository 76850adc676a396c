"""Fleet: several engines for one LLM (data parallelism), each in its own process.

    jobs --> Fleet --prompt--> engine 0: intake, steps, delivery   (with its own ranks, if any)
                   --prompt--> engine 1: ...
             <------ outputs, in the order in which they finish

A prompt is sent unprepared to the engine with the most free capacity; each engine holds a bounded
number of prompts. When an engine dies, its unfinished prompts are tried once more by another
engine. A prompt whose second engine dies, or that has produced output already, ends as an error;
the other engines continue.

Ctrl-C takes effect between messages, so the fleet always knows what was sent and received; it then
tells the engines to abort the prompts that nobody waits for. A second Ctrl-C does not wait for a
message to finish: the engine at the other end is stopped.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import EngineError, MMDeployLLMError, RequestError, WorkerDiedError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.parallel import Home, Message, Worker, close_all, finalize_here, interrupted_later
from mmdeploy_llm.startup.machine import read_machine
from mmdeploy_llm.startup.shares import engine_configs

from .belonging import CLOSED, CLOSED_MEANWHILE
from .fleet_engine import Abort, Answer, Ask, Call, Output, Ready, Task, serve_engine
from .outcome import Job, JobOutput, refused, text_of

logger = logging.getLogger(__name__)

MAX_TRIES = 2  # engines that may die while they work on one prompt


@dataclass(slots=True, eq=False)
class _Run:
    """The state of one call of `Fleet.run`. num_unfinished: tasks sent and not finished."""

    ready: deque[JobOutput] = field(default_factory=deque)
    num_unfinished: int = 0


@dataclass(slots=True, eq=False)
class _Sent:
    """A task that an engine works on. run: None once nobody waits for it. ended: indices of the
    samples that have finished."""

    job: Job
    run: _Run | None
    num_tries: int = 1
    has_output: bool = False
    ended: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Engine:
    """One engine's process, the tasks it works on, and why it died if it did."""

    worker: Worker
    num_ahead: int = 0
    sent: dict[int, _Sent] = field(default_factory=dict)
    death: WorkerDiedError | None = None

    @property
    def num_free(self) -> int:
        """How many more tasks the engine accepts now."""
        return self.num_ahead - len(self.sent)


class Fleet:
    """Runs jobs on several engines, as Driver does on one; a job's `accept` is an Ask.

    plugins: as loaded in this process. runtime: the resolved options of the first engine.
    num_blocks: blocks of the smallest KV cache.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Starts the engines and returns when all are ready. Raises what `start` raises, and
        WorkerDiedError."""
        self.plugins = PluginManager.load(config.plugins, config.blocked_plugins)
        machine = read_machine(config)  # compiles the kernels once, not in all engines at once
        self._lock = threading.RLock()
        self._home = Home()
        self._numbers = itertools.count()
        self._answers: dict[int, Answer | None] = {}  # by call; None until it has arrived
        self._is_closed = False
        self._is_ending = threading.Event()
        finalize_here(self, self._is_ending.set)
        self._engines: list[_Engine] = []
        try:
            for index, engine_config in enumerate(engine_configs(config, machine)):
                entry = partial(serve_engine, config=engine_config)
                worker = Worker(f"engine {index}", entry, is_quiet=index > 0)
                self._engines.append(_Engine(worker=worker))
            ready: list[Ready] = [engine.worker.receive() for engine in self._engines]
        except BaseException:
            for engine in self._engines:
                engine.worker.kill()
            raise
        for engine, own in zip(self._engines, ready, strict=True):
            engine.num_ahead = own.num_ahead
        self.runtime = ready[0].runtime
        self.num_blocks = min(own.num_blocks for own in ready)

    def run(self, jobs: Iterable[Job]) -> Generator[JobOutput, None, None]:
        """Yields outputs as Driver.run does. Raises WorkerDiedError when no engine is left."""
        self.check_open(CLOSED)
        return self._run(iter(jobs))

    def _run(self, source: Iterator[Job]) -> Generator[JobOutput, None, None]:
        run, is_open = _Run(), True
        try:
            while True:
                is_open = is_open and self._fill(run, source)
                while run.ready:
                    self.check_open()
                    yield run.ready.popleft()
                if not run.num_unfinished and not is_open:
                    break
                # Waits even if this run has no tasks: aborted ones may still fill the engines.
                self._pump(partial(self._can_go_on, run, is_open))
            self.check_open()
            self.check()
        finally:
            self._abandon(run)

    def _can_go_on(self, run: _Run, is_open: bool) -> bool:
        return bool(run.ready) or (is_open and self._num_free() > 0)

    def _num_free(self) -> int:
        """Returns the free capacity of the engine that has the most."""
        return max((engine.num_free for engine in self._living()), default=0)

    def check(self) -> None:
        """Raises WorkerDiedError when no engine is left."""
        deaths = [engine.death for engine in self._engines]
        if not self._is_closed and all(deaths):
            raise WorkerDiedError(f"no engine is left; the last one: {deaths[-1]}")

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Calls `method` of every engine's intake and returns the results. Raises what it raises
        there, as ask_one does."""
        return self._values_of(self._living(), Ask(method=method, args=args))

    def ask_one(self, method: str, *args: Any) -> Any:
        """Calls `method` of one engine's intake and returns the result; tries another engine when
        one dies. Raises WorkerDiedError when no engine is left."""
        while True:
            self.check()
            found = self._values_of(self._living()[:1], Ask(method=method, args=args))
            if found:
                return found[0]

    def _values_of(self, engines: list[_Engine], ask: Ask) -> list[Any]:
        """Returns the engines' answers, without those of engines that die meanwhile."""
        self.check_open(CLOSED)
        found = []
        for engine in engines:
            answer = self._answer_of(engine, ask)
            if answer is not None and answer.error is not None:
                raise answer.error
            found += [] if answer is None else [answer.value]
        return found

    def _answer_of(self, engine: _Engine, ask: Ask) -> Answer | None:
        number = next(self._numbers)
        message = Message(Call(number=number, ask=ask))
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
        """Stops all engines; runs, and later calls of `run`, raise EngineError. May be called from
        any thread and more than once."""
        self._is_closed = True
        for engine in self._engines:
            engine.worker.hang_up()  # wakes a thread that waits for the engines and has the lock
        with self._lock:
            close_all([engine.worker for engine in self._engines])

    def check_open(self, message: str = CLOSED_MEANWHILE) -> None:
        """Raises EngineError after `close`, and in a forked process."""
        if self._is_ending.is_set() and threading.current_thread().daemon:
            threading.Event().wait()  # the program ends, and the engines before this thread
        self._home.check()
        if self._is_closed:
            raise EngineError(message)

    def _living(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.death is None]

    def _fill(self, run: _Run, source: Iterator[Job]) -> bool:
        """Takes jobs from `source` while an engine has capacity. Returns False when the run takes
        no more."""
        while self._living():
            self.check_open()
            with self._lock:
                num_free = self._num_free()
            if num_free <= 0 or len(run.ready) >= self._engines[0].num_ahead:
                return True
            job = next(source, None)
            if job is None:
                return False
            with self._lock, interrupted_later():
                run.num_unfinished += 1
                self._send(_Sent(job=job, run=run))
        return False

    def _send(self, sent: _Sent) -> None:
        """Sends a task to the engine with the most free capacity."""
        task = Task(
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
        """Waits until an engine sends a message, and handles all that have arrived."""
        self.check_open()
        with self._lock:
            self.check_open()
            if is_enough():
                return
            engines = {engine.worker.connection: engine for engine in self._living()}
            for link in wait(list(engines)):
                self.check_open()
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
        """Stops an engine whose channel holds half a message."""
        self._lose(engine, WorkerDiedError("the engine was ended by two interrupts"))

    def _take(self, engine: _Engine, message: Answer | Output) -> None:
        if isinstance(message, Answer):
            if message.number in self._answers:  # else nobody waits for it any more
                self._answers[message.number] = message
            return
        sent = engine.sent[message.number]
        sent.has_output = True
        if message.output.finished:
            sent.ended.add(message.output.outputs.index)
        if len(sent.ended) == sent.job.num_outputs:
            del engine.sent[message.number]
        item = sent.job.prompt
        output = replace(message.output, prompt=message.output.prompt or text_of(item), item=item)
        self._hand_over(sent, JobOutput(job=sent.job, output=output, error=message.error))

    def _hand_over(self, sent: _Sent, item: JobOutput) -> None:
        """Puts an output into its run, unless nobody waits for it any more."""
        if sent.run is None:
            return
        sent.run.ready.append(item)
        if len(sent.ended) == sent.job.num_outputs:
            sent.run.num_unfinished -= 1
            sent.run = None

    def _fail(self, sent: _Sent, error: Exception) -> None:
        """Ends the unfinished samples of a task with error outputs."""
        for item in refused(sent.job, error):
            if item.output.outputs.index not in sent.ended:
                sent.ended.add(item.output.outputs.index)
                self._hand_over(sent, item)

    def _lose(self, engine: _Engine, error: MMDeployLLMError) -> None:
        """Records that an engine died and sends its tasks to other engines, each once more."""
        self.check_open()
        if engine.death is not None:
            return
        engine.death = death = WorkerDiedError(str(error))
        engine.worker.kill()
        lost, engine.sent = list(engine.sent.values()), {}
        logger.error("an engine died with %d unfinished prompts: %s", len(lost), error)
        for sent in lost:
            if sent.run is None:
                continue
            if sent.has_output or sent.num_tries == MAX_TRIES:
                self._fail(sent, death)
            else:
                sent.num_tries += 1
                self._send(sent)

    def _abandon(self, run: _Run) -> None:
        """Aborts the tasks that the run still waits for, and drops outputs that still arrive."""
        if not self._home.is_here or sys.is_finalizing():
            return
        with self._lock, interrupted_later():
            for engine in self._living():
                numbers = [number for number, sent in engine.sent.items() if sent.run is run]
                for number in numbers:
                    engine.sent[number].run = None
                if numbers and not self._is_closed:
                    self._deliver(engine, Message(Abort(numbers=tuple(numbers))))
