"""LocalDesk: an engine in this process, its intake, and the one thread that steps it.

    submit --> intake threads --> inbox --> loop thread: Engine.step while there is work --> tickets

The engine is built in the loop thread and never leaves it: what torch, OpenMP and the system keep
for each thread is kept once, and Ctrl-C, which Python raises in the main thread, never meets a
step. Callers are in no thread's way: a slow one delays nobody.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.intake.intake import Intake
from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.engine.startup.rooms import Assembly
from mmdeploy_llm.errors import EngineError, PluginError, RequestError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.media.boxes.reading import FoundBoxes
from mmdeploy_llm.media.kept import kept
from mmdeploy_llm.media.loading.cache import CacheStats
from mmdeploy_llm.request import Request
from mmdeploy_llm.system.processes import finalize_here, interrupt_thread

from .adapters import LocalAdapters
from .desk import CLOSE_SECONDS, CLOSED_MEANWHILE, DeskStats, Held

logger = logging.getLogger(__name__)

Task = Callable[[], object]
GIVE_WAY_SECONDS = 1e-6  # the system makes some 50 microseconds of it


class LocalDesk(LocalAdapters):
    """Computes prompts with one engine. The loop thread is the only writer of engine and tickets.

    engine, intake: as `start` has built them.
    """

    engine: Engine
    intake: Intake
    _pool: ThreadPoolExecutor

    def __init__(
        self, start: Callable[[], Assembly], step_lock: AbstractContextManager[None] | None = None
    ) -> None:
        """start: builds the engine, in the loop thread. Raises what it raises; Ctrl-C ends it.
        step_lock: entered for each step, where engines share the cores."""
        super().__init__()
        self._step_lock = nullcontext() if step_lock is None else step_lock
        self._inbox: SimpleQueue[Task | None] = SimpleQueue()  # None: end
        self._requests: dict[str, Held] = {}  # in the engine, by request id
        self._deadlines: list[tuple[float, int]] = []  # a heap of (end, number)
        self._mark = time.monotonic(), 0  # of the last `stats`, with its tokens
        self._fault: EngineError | None = None
        self._is_exiting = threading.Event()
        started: Future[None] = Future()
        self.thread = threading.Thread(
            target=self._run, args=(start, started), name="engine", daemon=True
        )
        self.thread.start()
        try:
            started.result()
        except KeyboardInterrupt:
            self.stop()
            interrupt_thread(self.thread)
            self.thread.join(CLOSE_SECONDS)
            raise
        except BaseException:
            self.thread.join(CLOSE_SECONDS)  # it has ended, but for the error that it reports
            raise
        finally:
            del started  # an error in it holds this frame, and the model as far as it was loaded

    @property
    def death(self) -> EngineError | None:
        """Why no step can be computed any more; None while steps can."""
        return self._fault or self.engine.death

    def count_tokens(self, prompt: Any) -> TokenCount:
        """Counts prompt and media tokens; see Desk."""
        self.check_open()
        return self.intake.count_tokens(prompt)

    def boxes(self, prompt: Any, text: str) -> FoundBoxes:
        """Returns the boxes in an answer; see Desk."""
        self.check_open()
        return self.intake.boxes(prompt, text)

    def copy_tokenizer(self) -> Any:
        """Returns a copy of the tokenizer; see Desk."""
        return self.intake.copy_tokenizer()

    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns the statistics of the media caches; see Desk."""
        return self.intake.cache_stats()

    def stats(self) -> DeskStats:
        """Returns the counters of this moment, also during a step."""
        found, inside = self.engine.stats(), tuple(self._requests.values())
        begin, before = self._mark
        now, self._mark = time.monotonic(), (time.monotonic(), found.num_generated_tokens)
        return DeskStats(
            num_running=found.num_running,
            num_waiting=found.num_waiting + len(self._held) - len(set(map(id, inside))),
            tokens_per_second=(found.num_generated_tokens - before) / max(now - begin, 1e-9),
            num_generated_tokens=found.num_generated_tokens,
            num_queried_tokens=found.num_queried_tokens,
            num_cached_tokens=found.num_cached_tokens,
            num_free_blocks=found.num_free_blocks,
            num_blocks=found.num_blocks,
            num_drafts=found.num_drafts,
            num_accepted_drafts=found.num_accepted_drafts,
        )

    def stop(self) -> None:
        """Ends the loop thread without waiting for it; see Desk."""
        self._is_closed = True
        self._inbox.put(None)

    def close(self) -> None:
        """Ends the loop thread; see Desk."""
        self._home.check()
        self.stop()
        if self.thread is threading.current_thread():
            return
        self.thread.join(CLOSE_SECONDS)
        if self.thread.is_alive():
            logger.warning(
                "close() does not wait any longer for the step that is being computed; the engine "
                "is closed when it ends"
            )

    # In the thread that submits, or in the loop thread.

    def _begin(self, held: Held) -> None:
        try:
            self._pool.submit(self._prepare, held)
        except RuntimeError:  # the pool is closed, or the interpreter ends and starts no threads
            reason = "the program is ending; no more prompts are accepted"
            self._post(partial(self._finish, held.number, EngineError(reason)))

    def _abort_begun(self, held: Held) -> bool:
        self.engine.abort(held.request_ids)
        return bool(held.request_ids)

    def _post(self, task: Task) -> None:
        self._inbox.put(task)

    def _watch(self, held: Held) -> None:
        assert held.deadline is not None
        entry = held.deadline.end, held.number
        self._post(lambda: heapq.heappush(self._deadlines, entry))

    # In the intake threads.

    def _prepare(self, held: Held) -> None:
        """Makes the requests of a prompt, unless it was aborted meanwhile."""
        ask = held.ask
        if held.number not in self._held:
            return
        try:
            adapter = self._adapter_of(ask)
            requests = self.intake.accept(
                ask.prompt,
                ask.params,
                item=kept(ask.shown),
                where=ask.where,
                stream=ask.stream,
                number=held.number,
                request_id=held.request_id,
                priority=held.priority,
                deadline=held.deadline,
                is_shared=ask.group is not None,
                wanted=ask.wanted,
                adapter=adapter,
            )
            self._post(partial(self._admit, held, requests))
        except BaseException as error:  # of the prompt or of a plugin: the prompt's own fault
            reason = error if isinstance(error, Exception) else PluginError(error_text(error))
            self._post(partial(self._finish, held.number, reason))

    # In the loop thread.

    def _run(self, start: Callable[[], Assembly], started: Future[None]) -> None:
        try:
            self._take_over(start())
        except BaseException as error:
            started.set_exception(error)
            del started  # see __init__
            return
        started.set_result(None)
        try:
            while (task := self._next_task()) is not None:
                task()
        except BaseException as error:  # a plugin may raise anything: nobody waits for this thread
            is_ours = isinstance(error, KeyboardInterrupt) and self._is_closed
            if not is_ours:  # else it was meant for `start`, whose caller has gone
                logger.exception("the engine cannot continue")
                self._fault = EngineError(f"the engine failed: {error_text(error)}")
        self._end()

    def _take_over(self, assembly: Assembly) -> None:
        self.engine, self.intake, self.model = assembly.engine, assembly.intake, assembly.model
        self.plugins, self.runtime = assembly.plugins, assembly.runtime
        self._table = assembly.adapters
        self.abilities = assembly.abilities
        self.media = assembly.intake.media
        self.num_kv_blocks = assembly.engine.info.num_blocks
        self.num_seqs = assembly.runtime.max_num_seqs
        num_threads = assembly.runtime.num_intake_threads
        self.max_begun = self.num_seqs + 2 * num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="intake")
        # No thread may be in C++ code when the interpreter ends: that aborts the process. This one
        # ends before the processes of ranks, whose finalizers are older.
        finalize_here(self, _end_thread, self._is_exiting, self._inbox, self.thread)

    def _next_task(self) -> Task | None:
        """Returns what to do next: what others have posted, then a step. Waits for work."""
        if self.engine.has_work and self._inbox.empty() and not self._deadlines:
            return self._step
        left = max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None
        if self.engine.has_work and self._inbox.empty():
            return self._step if left else self._expire
        try:
            return self._inbox.get(timeout=left)
        except Empty:
            return self._expire

    def _step(self) -> None:
        """Runs one step and puts its outputs into their tickets."""
        is_awaited = False
        with self._step_lock:
            outputs = self.engine.step()
        for output in outputs:
            held = self._requests[output.request_id]
            ticket = held.ticket()
            if output.finished:
                del self._requests[output.request_id]
                held.request_ids.remove(output.request_id)
                if not held.request_ids:  # before its reader knows, who may unload its adapter
                    self._finish(held.number)
            if ticket is not None:
                is_awaited |= ticket.put(output)
        if is_awaited:  # its reader runs now, and not in the way of the next step's threads
            time.sleep(GIVE_WAY_SECONDS)
        if self.death is not None:
            for held in list(self._held.values()):
                if not held.request_ids:
                    self._finish(held.number, self.death)

    def _admit(self, held: Held, requests: tuple[Request, ...]) -> None:
        """Adds a prepared prompt to the engine."""
        error: Exception | None = self.death
        if any(request.request_id in self._requests for request in requests):
            name = held.request_id
            error = RequestError(f"request_id {name!r} is in use; choose ids that differ, or none")
        if error is not None:
            self._finish(held.number, error)
        elif held.number in self._held:  # else it was aborted meanwhile
            held.request_ids = {request.request_id for request in requests}
            if (ticket := held.ticket()) is not None:
                ticket.num_requests = len(requests)
            for request in requests:
                self._requests[request.request_id] = held
                self.engine.add(request)

    def _expire(self) -> None:
        """Ends a prompt whose deadline has passed before it reached the engine, which ends its own
        ones."""
        _, number = heapq.heappop(self._deadlines)
        held = self._held.get(number)
        if held is not None and not held.request_ids and held.deadline is not None:
            state = "it was being prepared" if held.is_begun else "it waited to be prepared"
            self._finish(number, held.deadline.error(state))

    def _end(self) -> None:
        """Frees everything. When the program ends, callers are left to wait: daemon threads would
        report an error."""
        if not self._is_exiting.is_set():
            self._fail_all(self._fault or EngineError(CLOSED_MEANWHILE))
        self.intake.interrupt()  # so that a plugin or template that hangs does not delay the end
        self.model = None  # the engine's runner is the last to hold it
        self.engine.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.intake.close()


def _end_thread(
    is_exiting: threading.Event, inbox: SimpleQueue[Task | None], thread: threading.Thread
) -> None:
    """Ends the loop thread with the program."""
    if thread.is_alive() and thread is not threading.current_thread():
        is_exiting.set()
        inbox.put(None)
        thread.join(CLOSE_SECONDS)
