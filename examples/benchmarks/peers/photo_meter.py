"""Says where the processor's seconds of a batch of pictures go in this project's engine.

    decode     the intake's threads: JPEG to upright pixels
    resize     the intake's threads: to the model's size, normalised, in patch rows
    tower      calls of the vision tower
    prefill    steps that compute prompt tokens, without the tower; tokens of requests that decode
               meanwhile are computed in the same steps
    decoding   steps that compute only next tokens
    rest       everything else: reading, hashing, templates, records, Python between steps

Seconds of a step are those of the engine's thread and of the threads that compute for it; what the
intake uses meanwhile counts there. The clock's seconds without a step are `waiting`: the engine had
nothing to compute, so pictures were not hidden behind it. Linux only.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from mmdeploy_llm import LLM
from mmdeploy_llm.hooks import StepStats, hookimpl

PARTS = ("decode", "resize", "tower", "prefill", "decoding", "rest")


class Meter:
    """Measures one batch of one LLM in this process. Used once, after a first request has started
    the threads that compute."""

    def __init__(self, llm: LLM) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._llm, self._engine = llm, llm._desk.engine
        # The seconds of each thread, by its clock: one that wrote the cache of weights may end.
        self._seen = {_clock(thread): 0.0 for thread in _computing(llm._desk.thread)}
        self._lock = threading.Lock()
        self._stats: StepStats | None = None
        self._tower = 0.0
        llm.plugins.register(self, "photo_meter")

    @hookimpl
    def on_step(self, stats: StepStats) -> None:
        """Remembers what the step has computed."""
        self._stats = stats

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measures what the LLM does inside the block; then `seconds` has PARTS, "waiting" and
        "wall"."""
        with ExitStack() as stack:
            self._watch(stack, self._engine, "step", self._step)
            self._watch(stack, self._engine._runner._encoder, "encode", self._encode)
            kind = type(self._llm._desk.media.media.processors["image"])
            # Of the class: engines keep copies of a processor, one for each budget of tokens.
            self._watch(stack, kind, "decode", lambda call: self._intake(call, "decode"))
            self._watch(stack, kind, "process", lambda call: self._intake(call, "resize"))
            begin, cpu = time.perf_counter(), time.process_time()
            yield
            cpu = time.process_time() - cpu
            self.seconds["wall"] = time.perf_counter() - begin
        self.seconds["waiting"] = self.seconds["wall"] - self.seconds.pop("stepping")
        self.seconds["rest"] = cpu - sum(self.seconds[part] for part in PARTS)

    def _watch(self, stack: ExitStack, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        own = vars(owner).get(name)
        setattr(owner, name, wrap(getattr(owner, name)))
        stack.callback(setattr, owner, name, own) if own else stack.callback(delattr, owner, name)

    def _used(self) -> float:
        for clock in self._seen:
            with suppress(OSError):
                self._seen[clock] = time.clock_gettime(clock)
        return sum(self._seen.values())

    def _step(self, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._tower = 0.0
            begin, used = time.perf_counter(), self._used()
            done = call()
            used = self._used() - used
            self.seconds["stepping"] += time.perf_counter() - begin
            stats = self._stats
            is_decode = stats is None or stats.num_scheduled_tokens == stats.num_sampled_tokens
            self.seconds["decoding" if is_decode else "prefill"] += used - self._tower
            return done

        return run

    def _encode(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            used = self._used()
            try:
                return call(*args, **kwargs)
            finally:
                used = self._used() - used
                self._tower += used
                self.seconds["tower"] += used

        return run

    def _intake(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            used = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                with self._lock:
                    self.seconds[part] += time.thread_time() - used

        return run


def _computing(engine: threading.Thread) -> list[int]:
    """Returns the system's ids of the engine's thread and of all threads that are not Python's."""
    python = {thread.native_id for thread in threading.enumerate()} - {engine.native_id}
    return [tid for tid in map(int, _tasks()) if tid not in python]


def _tasks() -> list[str]:
    return [path.name for path in Path("/proc/self/task").iterdir()]


def _clock(tid: int) -> int:
    """Returns the id of the clock of a thread's processor time, as Linux numbers them."""
    return (~tid << 3) | 6
