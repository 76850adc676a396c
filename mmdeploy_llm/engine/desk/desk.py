"""Desk: where prompts are handed in, from any thread. The one way to an engine.

    submit --> queue, by priority --> begun: at most max_begun --> ended
                                      intake, engine

All desks share the queue and its limits; they differ in what they do with a prompt that is begun:
local.py computes it in this process, remote.py in another one, many.py gives it to another desk.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.engine.intake.prompts import adapter_of, deadline_of, priority_of
from mmdeploy_llm.errors import AbortedError, EngineError, QueueFullError, RequestError
from mmdeploy_llm.system.processes import Home
from mmdeploy_llm.values.deadline import Deadline, earlier

from .ask import Ask
from .ticket import Ticket

if TYPE_CHECKING:
    from mmdeploy_llm.engine.intake.rendered import TokenCount
    from mmdeploy_llm.hooks import Model, PluginManager
    from mmdeploy_llm.layers.pooling.abilities import Abilities
    from mmdeploy_llm.media.boxes.reading import FoundBoxes
    from mmdeploy_llm.media.loading.cache import CacheStats
    from mmdeploy_llm.media.loading.loader import MediaLoader
    from mmdeploy_llm.values.adapter_ref import AdapterRef
    from mmdeploy_llm.values.options.runtime_config import RuntimeConfig

CLOSED = "this LLM is closed; make a new one"
CLOSED_MEANWHILE = (
    "this LLM was closed while this call was running; prompts whose results were not returned yet "
    "have none. Make a new LLM for them"
)
CLOSE_SECONDS = 10.0  # that `close` waits for a step, and the end of the program too


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskStats:
    """Counters of a desk at one moment; those of tokens count from its start.

    num_running: requests that hold blocks of the KV cache.
    num_waiting: requests that do not run yet: they are queued, prepared, or preempted.
    tokens_per_second: generated since the last call of `stats`, or since the start.
    num_queried_tokens: tokens of the prompts that were admitted.
    num_cached_tokens: those of them that were found in the prefix cache.
    num_free_blocks: blocks that can be allocated, of num_blocks.
    num_drafts: tokens that were tried before they were sampled (speculative).
    num_accepted_drafts: those of them that were sampled.
    """

    num_running: int
    num_waiting: int
    tokens_per_second: float
    num_generated_tokens: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_free_blocks: int
    num_blocks: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0


@dataclass(slots=True, eq=False)
class Held:
    """A prompt that has not ended. Written by its desk.

    is_begun: whether it has left the queue.
    request_ids: of its requests in the engine that have not ended (LocalDesk).
    inner, desk: the ticket of the desk that it was given to, and that desk (ManyDesks).
    num_tries, has_output: engines that have begun it, and whether one had a result (ManyDesks).
    """

    ask: Ask
    number: int
    request_id: str
    ticket: weakref.ref[Ticket]
    priority: int
    deadline: Deadline | None
    is_begun: bool = False
    request_ids: set[str] = field(default_factory=set)
    inner: Ticket | None = None
    desk: Desk | None = None
    num_tries: int = 0
    has_output: bool = False


class Desk(ABC):
    """Takes prompts and returns tickets. Its methods may be called from any thread; in a forked
    process they raise EngineError.

    submit(ask, on_news=None, max_queued=None, waits=True): on_news is told about news of the
        ticket, see Ticket. max_queued: prompts that may be here beyond the num_seqs that can be
        computed at the same time; more of them wait in `submit` until there is room or, unless
        `waits`, raise QueueFullError. None: no limit.

    runtime: every option with its final value. num_kv_blocks: blocks of the smallest KV cache.
    max_begun: prompts that may be begun at the same time: the engine computes some of them while
        others are prepared. num_seqs: prompts that can be computed at the same time.
    abilities: what the model can give. plugins: as loaded in this process. model, media: None where
        other processes have them.
    """

    runtime: RuntimeConfig
    abilities: Abilities
    num_kv_blocks: int
    max_begun: int
    num_seqs: int
    plugins: PluginManager
    model: Model | None = None
    media: MediaLoader | None = None

    def __init__(self) -> None:
        self._home = Home()
        self._has_room = threading.Condition()  # its lock guards the fields below
        self._held: dict[int, Held] = {}
        self._queue: list[tuple[int, int]] = []  # a heap of (priority, number)
        self._num_begun = 0
        self._is_closed = False
        self._numbers = itertools.count()

    def submit(
        self,
        ask: Ask,
        on_news: Callable[[Ticket], object] | None = None,
        *,
        max_queued: int | None = None,
        waits: bool = True,
        number: int | None = None,
        deadline: Deadline | None = None,
    ) -> Ticket:
        """Returns the ticket of a prompt, which is prepared and computed from now on; see Desk.
        number, deadline: given by another desk, with the priority in the ask. Raises EngineError
        when nothing is computed any more."""
        self.check()
        priority, fault = ask.priority, None
        if number is None:  # else another desk has read them
            number = next(self._numbers)
            priority, deadline = priority_of(None, ask.priority), deadline_of(None, ask.timeout)
            try:
                priority = priority_of(ask.prompt, priority)
                deadline = earlier(deadline, deadline_of(ask.prompt))
            except RequestError as error:
                fault = error
        ticket = Ticket(ask, number, self.abort, on_news)
        if fault is not None:
            ticket.end(fault)
            return ticket
        seen = weakref.ref(ticket, lambda _: self.abort(number))
        held = Held(ask, number, ticket.request_id, seen, priority, deadline)
        with self._has_room:
            if max_queued is not None:
                self._wait_for_room(self.num_seqs + max_queued, waits)
            self.check()
            self._held[number] = held
            heapq.heappush(self._queue, (priority, number))
        if deadline is not None:
            self._watch(held)
        self._begin_some()
        return ticket

    def abort(self, number: int) -> None:
        """Ends a prompt at the next step, by the number of its ticket; does nothing in a forked
        process. Takes no lock: the collector of garbage calls it too."""
        if self._home.is_here:
            self._post(partial(self._abort, number))

    @property
    def num_free(self) -> int:
        """How many more prompts may be begun now."""
        return self.max_begun - self._num_begun

    @property
    @abstractmethod
    def death(self) -> EngineError | None:
        """Why nothing can be computed any more; None while it can."""

    def check(self) -> None:
        """Raises EngineError after `close`, when the engine has died, and in a forked process."""
        self.check_open()
        if self.death is not None:
            raise self.death

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def check_open(self, message: str = CLOSED) -> None:
        """Raises EngineError after `close` and in a forked process."""
        self._home.check()
        if self._is_closed:
            raise EngineError(message)

    @abstractmethod
    def count_tokens(self, prompt: Any) -> TokenCount:
        """Counts prompt and media tokens. Raises RequestError for a prompt that cannot be
        prepared."""

    @abstractmethod
    def boxes(self, prompt: Any, text: str) -> FoundBoxes:
        """Returns the boxes in an answer to a prompt with one picture. Raises RequestError."""

    @abstractmethod
    def load_adapter(self, name: str, source: str) -> AdapterRef:
        """Makes the adapter in a folder, or on the hub, known by a name. Raises ConfigError and
        CheckpointError."""

    @abstractmethod
    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter and frees its memory. Raises RequestError for an unknown one, and for
        one that prompts use."""

    @abstractmethod
    def adapters(self) -> Mapping[str, AdapterRef]:
        """Returns the adapters that prompts may name."""

    @abstractmethod
    def copy_tokenizer(self) -> Any:
        """Returns a copy of transformers' tokenizer."""

    @abstractmethod
    def cache_stats(self) -> Mapping[str, CacheStats]:
        """Returns the statistics of the media caches, by name."""

    @abstractmethod
    def stats(self) -> DeskStats:
        """Returns the counters of this moment."""

    @abstractmethod
    def stop(self) -> None:
        """Ends everything after the step that is being computed, without waiting for it. Takes no
        lock."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything after the step that is being computed: tickets that have not ended get
        an EngineError. May be called from any thread and more than once."""

    @property
    def num_dead(self) -> int:
        """How many engines have died while others compute."""
        return 0

    def revive(self) -> None:
        """Starts engines in place of those that have died while others compute. Called by one
        thread at a time; raises what loading raises."""
        return

    @abstractmethod
    def _begin(self, held: Held) -> None:
        """Starts to work on a prompt."""

    @abstractmethod
    def _abort_begun(self, held: Held) -> bool:
        """Aborts what was begun, whose last output then comes; False: nothing can come any
        more."""

    @abstractmethod
    def _post(self, task: Callable[[], object]) -> None:
        """Calls the task in a thread of the desk, soon. Takes no lock."""

    @abstractmethod
    def _watch(self, held: Held) -> None:
        """Sees to it that a prompt with a deadline ends in time."""

    def _check_unused(self, name: str) -> None:
        """Raises RequestError while prompts that are here name an adapter."""
        asks = [held.ask for held in tuple(self._held.values())]
        usual = self.runtime.options.default_adapter
        count = sum(_uses(ask, name, usual) for ask in asks)
        if count:
            raise RequestError(
                f"adapter {name!r} is in use by {count} prompts; unload it once they have ended"
            )

    def _can_begin(self, held: Held) -> bool:
        return self.num_free > 0

    def _abort(self, number: int) -> None:
        held = self._held.get(number)
        if held is not None and not (held.is_begun and self._abort_begun(held)):
            self._finish(number, AbortedError("aborted by the caller"))

    def _begin_some(self) -> None:
        """Begins what can be begun of the queue."""
        while (held := self._next()) is not None:
            self._begin(held)

    def _next(self) -> Held | None:
        with self._has_room:
            while self._queue:
                held = self._held.get(self._queue[0][1])  # None: it was aborted
                if held is not None and not self._can_begin(held):
                    return None
                heapq.heappop(self._queue)
                if held is not None:
                    self._num_begun += 1
                    held.is_begun = True
                    return held
        return None

    def _finish(self, number: int, error: Exception | None = None) -> None:
        """Forgets a prompt, whose ticket ends with `error` unless its outputs are complete, and
        begins others in its place."""
        with self._has_room:
            held = self._held.pop(number, None)
            if held is None:
                return
            self._num_begun -= held.is_begun
            self._has_room.notify_all()
        ticket = held.ticket()
        if ticket is not None and error is not None:
            ticket.end(error)
        self._begin_some()

    def _fail_all(self, error: EngineError) -> None:
        """Ends all tickets, once the desk is closed or has died."""
        with self._has_room:
            everything, self._held, self._queue = list(self._held.values()), {}, []
            self._num_begun = 0
            self._has_room.notify_all()
        for ticket in (held.ticket() for held in everything):
            if ticket is not None:
                ticket.end(error)

    def _wait_for_room(self, most: int, waits: bool) -> None:
        while len(self._held) >= most:
            if not waits:
                raise QueueFullError(
                    f"{len(self._held)} requests are here already, and max_queued allows {most} "
                    "together with those that are computed; submit later, raise max_queued, or wait"
                )
            self._has_room.wait()
            self.check()


def _uses(ask: Ask, name: str, usual: str) -> bool:
    """Whether a prompt is computed with an adapter. usual: of prompts that name none."""
    try:
        return adapter_of(ask.prompt, ask.adapter or usual) == name
    except RequestError:  # it names none rightly, and will end with that error
        return False
