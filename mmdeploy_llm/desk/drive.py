"""Driver: feeds an engine from an iterable of prompts and yields results as they finish.

    jobs --(bounded pool of threads: intake)--> requests --> engine.step() --> outputs, by job

Intake prepares a bounded number of prompts before the engine needs them, so that decoding and
resizing media overlap with compute, and memory does not depend on the number of prompts.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from mmdeploy_llm.engine import Engine
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.parallel import Home, finalize_here
from mmdeploy_llm.request import Request

from .belonging import CLOSED, CLOSED_MEANWHILE
from .outcome import Job, JobOutput, refused

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # between two checks whether `close` was called
CLOSE_SECONDS = 10.0  # that `close` waits for a step


@dataclass(slots=True, eq=False)
class _Run:
    """The state of one call of `Driver.run`. Written by the thread that iterates it."""

    pending: deque[tuple[Job, Future[tuple[Request, ...]]]] = field(default_factory=deque)
    running: dict[str, Job] = field(default_factory=dict)
    ready: deque[JobOutput] = field(default_factory=deque)


class Driver:
    """Runs jobs on one engine. Several runs may be open at once, in one thread or in many; each
    receives its own outputs."""

    def __init__(self, engine: Engine, *, num_threads: int, num_ahead: int) -> None:
        """num_threads: threads that prepare prompts. num_ahead: upper bound of the jobs of a run
        that are prepared, computed or not yet yielded."""
        self._engine = engine
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="intake")
        self._runs: dict[str, _Run] = {}  # by request id
        self._lock = threading.RLock()
        self._home = Home()
        self._is_closed = self._is_stepping = False
        # No daemon thread may be in a step when the interpreter ends: the end of a thread within
        # C++ code aborts the process.
        finalize_here(self, self._lock.acquire, timeout=CLOSE_SECONDS)

    def run(self, jobs: Iterable[Job]) -> Generator[JobOutput, None, None]:
        """Yields outputs as they come; the last output of each request is `finished`.

        Jobs are taken from the iterable when the engine has capacity for them. Closing the iterator
        aborts the requests that are still running. When the engine dies, its requests end as
        errors; after these outputs WorkerDiedError is raised. Raises EngineError at once in a
        forked process, and in the iterator when `close` is called.
        """
        self.check_open(CLOSED)
        return self._run(iter(jobs))

    def _run(self, source: Iterator[Job]) -> Generator[JobOutput, None, None]:
        run = _Run()
        try:
            while self._fill(run, source) or run.pending or run.running or run.ready:
                self._admit(run)
                while run.ready:
                    self.check_open(CLOSED_MEANWHILE)
                    yield run.ready.popleft()
                self.check_open(CLOSED_MEANWHILE)
                if run.running:
                    self._step()
                elif run.pending:
                    futures = [future for _, future in run.pending]
                    wait(futures, POLL_SECONDS, return_when=FIRST_COMPLETED)
            self.check_open(CLOSED_MEANWHILE)
            self.check()
        finally:
            self._abandon(run)

    def check(self) -> None:
        """Raises WorkerDiedError when the engine has died."""
        if self._engine.death is not None:
            raise self._engine.death

    def close(self) -> None:
        """Ends all runs after the step that is being computed, stops the intake threads and closes
        the engine. Runs, and later calls of `run`, raise EngineError. May be called from any thread
        and more than once."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            logger.warning(
                "close() does not wait any longer for the step that is being computed; the engine "
                "is closed when it ends"
            )
            return
        try:
            # A signal handler may call this during a step, which then closes the engine at its end.
            if not self._is_stepping:
                self._engine.close()
        finally:
            self._lock.release()

    def check_open(self, message: str = CLOSED) -> None:
        """Raises EngineError after `close`, and in a forked process."""
        self._home.check()
        if self._is_closed:
            raise EngineError(message)

    def _fill(self, run: _Run, source: Iterator[Job]) -> bool:
        """Takes jobs from `source` while there is capacity. Returns False when the run takes no
        more."""
        if self._engine.death is not None:
            return False
        while len(run.pending) + len(run.running) + len(run.ready) < self._num_ahead:
            job = next(source, None)
            if job is None:
                return False
            run.pending.append((job, self._submit(job)))
        return True

    def _submit(self, job: Job) -> Future[tuple[Request, ...]]:
        try:
            return self._pool.submit(job.accept)
        except RuntimeError:  # the pool is closed, or the interpreter ends and starts no threads
            self.check_open(CLOSED_MEANWHILE)
            raise EngineError("the program is ending; no more prompts are accepted") from None

    def _admit(self, run: _Run) -> None:
        """Hands prepared prompts to the engine; a slow one does not delay those after it."""
        for _ in range(len(run.pending)):
            job, future = run.pending.popleft()
            if not future.done():
                run.pending.append((job, future))
                continue
            if future.cancelled():  # by `close`
                continue
            error = future.exception()
            if error is None:
                self._add(run, job, future.result())
            elif isinstance(error, Exception):
                run.ready.extend(refused(job, error))
            else:
                raise error

    def _add(self, run: _Run, job: Job, requests: tuple[Request, ...]) -> None:
        with self._lock:
            for request in requests:
                self._runs[request.request_id] = run
                run.running[request.request_id] = job
                self._engine.add(request)

    def _step(self) -> None:
        """Runs one engine step and gives each output to the run it belongs to."""
        with self._lock:
            if self._is_closed:
                return
            self._is_stepping = True
            try:
                outputs = self._engine.step()
            finally:
                self._is_stepping = False
                if self._is_closed:
                    self._engine.close()
            for output in outputs:
                run = self._runs[output.request_id]
                run.ready.append(JobOutput(job=run.running[output.request_id], output=output))
                if output.finished:
                    del self._runs[output.request_id], run.running[output.request_id]

    def _abandon(self, run: _Run) -> None:
        if not self._home.is_here or sys.is_finalizing():
            return
        for _, future in run.pending:
            future.cancel()
        with self._lock:
            self._engine.abort(run.running)
            if run.running:
                self._step()  # collects their last outputs, unless an interrupt has lost these
            for request_id in run.running:
                self._runs.pop(request_id, None)
