"""Driver: feeds an engine from an iterable of prompts and gives results back as they come.

    jobs --(bounded pool of threads: intake)--> requests --> engine.step() --> outputs, by job

Intake runs ahead of the engine by a bounded number of prompts, so that decoding and resizing
overlap with compute and memory does not depend on how many prompts there are.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from .engine import Engine
from .errors import EngineError, MMDeployLLMError
from .outputs import CompletionOutput, RequestMetrics, RequestOutput
from .request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to run. accept: makes its requests, in an intake thread. num_outputs: its `n`."""

    index: int
    prompt: Any
    num_outputs: int
    accept: Callable[[], tuple[Request, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutput:
    """An output and the job it belongs to. error: the exception behind an output that intake
    refused."""

    job: Job
    output: RequestOutput
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """One call of `Driver.run`: what it waits for. Written by the thread that iterates it."""

    pending: deque[tuple[Job, Future[tuple[Request, ...]]]] = field(default_factory=deque)
    running: dict[str, Job] = field(default_factory=dict)
    ready: deque[JobOutput] = field(default_factory=deque)


class Driver:
    """Several runs may be open at once, in one thread or in many: each gets its own outputs."""

    def __init__(self, engine: Engine, *, num_threads: int, num_ahead: int) -> None:
        self._engine = engine
        self._num_ahead = num_ahead
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="intake")
        self._runs: dict[str, _Run] = {}  # by request id
        self._lock = threading.RLock()
        self._is_closed = False

    def run(self, jobs: Iterable[Job]) -> Iterator[JobOutput]:
        """Outputs in the order in which they come; a job's requests end with `finished` outputs.

        Jobs are taken from the iterable when there is room for them. Closing the iterator aborts
        what is still running.
        """
        run, source, is_dry = _Run(), iter(jobs), False
        try:
            while True:
                while not is_dry and self._has_room(run):
                    job = next(source, None)
                    is_dry = job is None
                    if job is not None:
                        run.pending.append((job, self._submit(job)))
                self._admit(run)
                yield from self._take(run)
                if run.running:
                    self._step()
                elif run.pending:
                    wait([run.pending[0][1]])
                elif is_dry and not run.ready:
                    return
        finally:
            self._abandon(run)

    def close(self) -> None:
        """Ends the intake threads; later calls of `run` raise EngineError."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _has_room(self, run: _Run) -> bool:
        return len(run.pending) + len(run.running) < self._num_ahead

    def _submit(self, job: Job) -> Future[tuple[Request, ...]]:
        if self._is_closed:
            raise EngineError("this LLM is closed; make a new one")
        return self._pool.submit(job.accept)

    def _admit(self, run: _Run) -> None:
        """Hands prepared requests to the engine, in the order of their jobs."""
        while run.pending and run.pending[0][1].done():
            job, future = run.pending.popleft()
            error = future.exception()
            if error is None:
                self._add(run, job, future.result())
            elif isinstance(error, Exception):
                run.ready.extend(_refused(job, error))
            else:
                raise error

    def _add(self, run: _Run, job: Job, requests: tuple[Request, ...]) -> None:
        with self._lock:
            for request in requests:
                self._runs[request.request_id] = run
                run.running[request.request_id] = job
                self._engine.add(request)

    def _take(self, run: _Run) -> Iterator[JobOutput]:
        while run.ready:
            yield run.ready.popleft()

    def _step(self) -> None:
        """One engine step; its outputs go to the runs they belong to."""
        with self._lock:
            for output in self._engine.step():
                run = self._runs[output.request_id]
                run.ready.append(JobOutput(job=run.running[output.request_id], output=output))
                if output.finished:
                    del self._runs[output.request_id], run.running[output.request_id]

    def _abandon(self, run: _Run) -> None:
        for _, future in run.pending:
            future.cancel()
        with self._lock:
            self._engine.abort(run.running)
            while run.running:
                self._step()


def _refused(job: Job, error: Exception) -> Iterator[JobOutput]:
    """The error outputs of a job that intake could not turn into requests."""
    code = error.code if isinstance(error, MMDeployLLMError) else 500
    if not isinstance(error, MMDeployLLMError):
        logger.error("a prompt could not be prepared", exc_info=error)
    message = (
        str(error) if isinstance(error, MMDeployLLMError) else f"{type(error).__name__}: {error}"
    )
    for index in range(job.num_outputs):
        output = RequestOutput(
            request_id=f"refused-{job.index}-{index}",
            prompt=job.prompt,
            outputs=CompletionOutput(index=index, finish_reason="error"),
            finished=True,
            metrics=RequestMetrics(arrival_time=time.time()),
            error_code=code,
            error_msg=message,
        )
        yield JobOutput(job=job, output=output, error=error)
