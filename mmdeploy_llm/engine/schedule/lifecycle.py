"""Lifecycle: the state of each request and what it holds; the only place where these change."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Sequence
from operator import attrgetter

from mmdeploy_llm.request import Request, RequestStatus
from mmdeploy_llm.values.outputs.metrics import EngineStats
from mmdeploy_llm.values.outputs.request_output import FinishReason
from mmdeploy_llm.values.plan import ScheduledTokens, StepPlan

from .adapters import AdapterBudget
from .blocks import BlockPool
from .chunks import are_apart, split_spans
from .encoder_budget import EncoderBudget
from .limits import SchedulerConfig
from .prefix import PrefixKeys
from .state import RequestState
from .states import StateRows
from .windows import WindowBlocks


class WaitingQueue:
    """A priority queue sorted by `RequestState.order`; every operation is O(log n).

    A preempted request keeps its order and so returns before all of its priority that arrived
    later. The scheduler is the only writer.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], RequestState]] = []
        self._members: dict[int, RequestState] = {}  # by number; the heap also holds removed ones

    def __len__(self) -> int:
        return len(self._members)

    def push(self, state: RequestState) -> None:
        """Adds a request that is not in the queue."""
        self._members[state.number] = state
        heapq.heappush(self._heap, (state.order, state))

    def peek(self) -> RequestState | None:
        """Returns the next request, or None when the queue is empty."""
        while self._heap and self._heap[0][1].number not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> RequestState:
        """Removes and returns the next request."""
        state = self.peek()
        assert state is not None, "the queue is empty"
        heapq.heappop(self._heap)
        return self._members.pop(state.number)

    def remove(self, state: RequestState) -> None:
        """Removes a waiting request from any position."""
        del self._members[state.number]

    def states(self) -> list[RequestState]:
        """Returns all waiting requests, in no particular order."""
        return list(self._members.values())


by_order = attrgetter("order")
Ids = tuple[int, ...]


class Lifecycle:
    """All unfinished requests with their blocks and media. The scheduler is its only user.

         add            start                       finish
        -----> waiting --------> running ------------------> gone, blocks free, slot in `drop`
                  ^                 |
                  +---- preempt ----+

    states: request id -> state.
    running: sorted by `RequestState.order`, so the last is the newest.
    next_end: no deadline of a request passes before, in seconds of time.monotonic.
    num_generated_tokens: of all requests, counted by the scheduler. num_drafts,
        num_accepted_drafts: see EngineStats, counted by Speculation.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.pool = BlockPool(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_idle_blocks=config.max_idle_blocks,
        )
        self.windows = None if config.window is None else WindowBlocks(config)
        self.rows: StateRows | None = None
        if config.num_state_rows:
            idle = config.max_idle_states if config.enable_prefix_caching else 0
            self.rows = StateRows(
                num_rows=config.num_state_rows, max_idle=idle, block_size=config.block_size
            )
        # Without chunks a prompt needs all its media in one step, limited only by the cache.
        is_chunked = config.enable_chunked_prefill
        self.encoder = EncoderBudget(
            capacity=config.encoder_cache_tokens,
            step_capacity=config.max_num_batched_tokens
            if is_chunked
            else config.encoder_cache_tokens,
        )
        self.adapters = AdapterBudget(
            max_adapters=config.max_adapters, max_bytes=config.adapter_bytes
        )
        self.states: dict[str, RequestState] = {}
        self.waiting = WaitingQueue()
        self.running: list[RequestState] = []
        self.num_preemptions = self.num_generated_tokens = 0
        self.num_drafts = self.num_accepted_drafts = 0
        self._num_queried_tokens = self._num_cached_tokens = 0
        self._num_added = 0
        self.next_end = math.inf
        self._drop: dict[str, None] = {}

    def add(self, request: Request) -> RequestState:
        """Queues a request."""
        assert request.request_id not in self.states, f"{request.request_id} is already here"
        assert not request.media or are_apart(request), "spans overlap"
        self._num_added += 1
        state = RequestState.of(request, self._num_added, self._config)
        self.states[request.request_id] = state
        self.waiting.push(state)
        if request.deadline is not None:
            self.next_end = min(self.next_end, request.deadline.end)
        return state

    def take_expired(self, now: float) -> list[RequestState]:
        """Returns the requests whose deadline has passed. The caller finishes them."""
        ends = [
            (state.request.deadline.end, state)
            for state in self.states.values()
            if state.request.deadline is not None
        ]
        self.next_end = min((end for end, _ in ends if end > now), default=math.inf)
        return [state for end, state in ends if end <= now]

    def start(self, state: RequestState, matched: Sequence[int], num_new: int, now: float) -> None:
        """Runs the next waiting request, on `matched` cached blocks and `num_new` others, and from
        the state that is kept for these blocks."""
        if self.windows is not None:
            self.windows.start(state, len(matched))
        if self.rows is not None and matched:
            self.rows.start(state, len(matched))
        request = state.request
        popped = self.waiting.pop()
        assert popped is state, "not the next one"
        insort(self.running, state, key=by_order)
        request.status = RequestStatus.RUNNING
        if request.adapter is not None:
            self.adapters.hold(request.request_id, request.adapter)
        request.block_ids = self.pool.allocate(num_new, matched)
        request.num_computed_tokens = len(matched) * self._config.block_size
        state.num_registered_blocks = len(matched)
        if request.inference_start_time is None:
            request.inference_start_time = now
            request.num_cached_tokens = request.num_computed_tokens
            self._num_queried_tokens += request.num_tokens
            self._num_cached_tokens += request.num_cached_tokens

    def schedule(
        self, state: RequestState, start: int, end: int, blocks: Ids, drafts: Ids = ()
    ) -> ScheduledTokens:
        """Schedules tokens start .. end of a running request, the last of which are drafts, with
        new blocks and what else they need."""
        return ScheduledTokens(
            request_id=state.request.request_id,
            start=start,
            num_tokens=end - start,
            new_block_ids=blocks,
            new_window_ids=() if self.windows is None else self.windows.plan(state, end),
            samples=state.request.wanted is None and end - len(drafts) >= state.request.num_tokens,
            state_rows=None if self.rows is None else self.rows.plan(state),
            drafts=drafts,
        )

    def advance(self, state: RequestState, item: ScheduledTokens, num_right: int) -> None:
        """Marks the tokens of `item` as computed, registers full blocks, releases finished media.
        num_right: of its drafts; with a wrong one, a model with states computes them all again."""
        request = state.request
        if self.rows is not None and num_right < len(item.drafts):
            self.rows.reject(state)
            return
        end = item.start + item.num_tokens - len(item.drafts)
        request.num_computed_tokens = end + num_right
        num_registered, num_full = state.num_registered_blocks, end // self._config.block_size
        if num_full > num_registered:
            self.pool.register(request.block_ids, state.keys, num_registered, num_full)
            state.num_registered_blocks = num_full
        if self.windows is not None:
            self.windows.advance(state, num_registered, num_full)
        if self.rows is not None:
            self.rows.commit(state, item.num_tokens)
        if request.media and item.start < request.media[-1].end:
            split = [span.item.key for span in split_spans(request)]
            self.encoder.keep_only(request.request_id, split)

    def preempt(self, state: RequestState) -> None:
        """Sends a running request back to the queue; content that the prefix cache loses until
        it runs again is recomputed."""
        self._leave(state)
        state.start_over()
        state.request.status = RequestStatus.WAITING
        state.request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(state)

    def lengthen(self, state: RequestState) -> None:
        """Preempts a running request that has grown long for its model: all its tokens are computed
        again. The prefix cache gives it only blocks of other requests that were long."""
        self.preempt(state)
        state.keys = PrefixKeys(state.request, self._config.block_size, is_long=True)
        state.next_end = state.max_num_tokens

    def finish(self, state: RequestState, reason: FinishReason) -> None:
        """Ends a request, for whatever reason."""
        request = state.request
        self._leave(state)
        request.block_ids = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.states[request.request_id]

    @property
    def has_seat(self) -> bool:
        """Whether another request may run."""
        return len(self.running) < self._config.max_num_seqs

    @property
    def has_drop(self) -> bool:
        """Whether the next plan drops any request."""
        return bool(self._drop)

    def take_drop(self) -> tuple[str, ...]:
        """Returns the ids of requests that left the runner's slots since the last call."""
        drop, self._drop = tuple(self._drop), {}
        return drop

    def drop_again(self, request_ids: Iterable[str]) -> None:
        """Repeats the `drop` of a plan that may not have been carried out."""
        self._drop.update(dict.fromkeys(request_ids))

    def _leave(self, state: RequestState) -> None:
        request = state.request
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(state)
            return
        self.running.remove(state)
        if request.adapter is not None:
            self.adapters.release(request.request_id, request.adapter)
        self.pool.free(request.block_ids)
        if self.windows is not None:
            self.windows.leave(state)
        if self.rows is not None:
            self.rows.leave(state)
        self.encoder.keep_only(request.request_id)
        self._drop[request.request_id] = None

    def stats(self) -> EngineStats:
        """Returns the counters of this moment."""
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_free_blocks=self.pool.num_free,
            num_blocks=self._config.num_blocks,
            num_queried_tokens=self._num_queried_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_preemptions=self.num_preemptions,
            num_drafts=self.num_drafts,
            num_accepted_drafts=self.num_accepted_drafts,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks, media, queues and requests agree. For tests:
        slow."""
        running = [state.request for state in self.running]
        waiting = [state.request for state in self.waiting.states()]
        self.pool.check_integrity([request.block_ids for request in running])
        if self.windows is not None:
            self.windows.pool.check_integrity([state.window.held for state in self.running])
        if self.rows is not None:
            held = [(state.state_row, *state.planned_rows) for state in self.running]
            self.rows.check_integrity([row for rows in held for row in rows])
        split = {r.request_id: [span.item.key for span in split_spans(r)] for r in running}
        self.encoder.check_integrity(split)
        self.adapters.check_integrity([(r.request_id, r.adapter) for r in running])
        assert {request.request_id for request in (*running, *waiting)} == set(self.states)
        assert len(running) + len(waiting) == len(self.states), "a request runs and waits"
        assert len(running) <= self._config.max_num_seqs
        assert self.running == sorted(self.running, key=by_order), "running out of order"
        for request in running:
            num_needed = self._config.num_blocks_for(request.num_computed_tokens)
            assert request.status is RequestStatus.RUNNING
            assert request.num_computed_tokens < request.num_tokens
            assert len(request.block_ids) >= num_needed, "computed tokens without a block"
        for request in waiting:
            assert request.status is RequestStatus.WAITING
            assert not request.block_ids
            assert request.num_computed_tokens == 0


def following(
    plan: StepPlan, requests: Lifecycle, block_size: int
) -> tuple[ScheduledTokens, ...] | None:
    """Schedules the next token of each request of `plan`, in the same order, and allocates the
    blocks. Returns None where one of them does not decode on, another one is running, or blocks are
    missing."""
    states = [requests.states.get(item.request_id) for item in plan.scheduled]
    running = [state for state in states if state is not None and state.can_go_on(1)]
    is_whole = all(item.samples for item in plan.scheduled)
    if not is_whole or not running or len(running) < max(len(states), len(requests.running)):
        return None
    starts = [item.start + item.num_tokens for item in plan.scheduled]
    full = [len(state.request.block_ids) * block_size for state in running]
    is_full = [start == end for start, end in zip(starts, full, strict=True)]
    if not requests.pool.can_allocate(sum(is_full)):
        return None
    if requests.rows is not None and requests.rows.num_free < len(running):
        return None
    scheduled = []
    for state, start, needs_block in zip(running, starts, is_full, strict=True):
        new_block_ids = tuple(requests.pool.allocate(1)) if needs_block else ()
        state.request.block_ids.extend(new_block_ids)
        scheduled.append(requests.schedule(state, start, start + 1, new_block_ids))
    return tuple(scheduled)
