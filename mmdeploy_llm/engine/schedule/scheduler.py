"""Scheduler: decides who runs, how many tokens, which blocks, what to encode, what to forget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

from mmdeploy_llm.errors import ABORTED
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.metrics import EngineStats
from mmdeploy_llm.values.outputs.request_output import FinishReason, RequestOutput
from mmdeploy_llm.values.plan import (
    RequestFailure,
    ScheduledTokens,
    StepPlan,
    StepResult,
    TokenUpdate,
)

from .admission import matched_blocks, may_grow, num_reserved_blocks, startable
from .chunks import Chunk, next_chunk, tokens_to_border
from .lifecycle import Lifecycle, following
from .limits import SchedulerConfig, lateness, overgrowth, refusal
from .speculation import Speculation
from .state import RequestState
from .step import StepDraft

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Plans steps and applies their results; the only writer of requests after intake. One thread.

    The engine calls, in every step and in this order:

        updates  = scheduler.abort(request_ids)           when the caller requested it
        updates += scheduler.expire(monotonic)            those whose deadline has passed
        plan     = scheduler.plan(now)                    or the plan that plan_next returned
        updates += scheduler.commit(plan, result, now)    or scheduler.fail(plan, failure)
        outputs  = delivery.deliver(updates)
        scheduler.release(outputs)

    Every request ends with exactly one update that has a finish_reason, unless delivery ends it
    first (a stop string): then `release` ends it. In both cases its blocks are free at once and its
    slot is in the `drop` of the next plan. A plan may schedule nothing and still be needed: its
    commit reports the failures of requests that can never run.

    Requests are served by smaller `priority`, then earlier `arrival_time`, then earlier `add`. A
    waiting request that lacks a seat or blocks takes them from running ones of a larger priority,
    the last in that order first. The first of all requests is never preempted, so it always makes
    progress.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """clock: measures steps with drafts and without, in seconds."""
        self._config = config
        self._requests = Lifecycle(config)
        self._pool = self._requests.pool
        self._rows = self._requests.rows
        self._encoder = self._requests.encoder
        self._failed: list[TokenUpdate] = []  # failed outside a commit; the next commit reports it
        self._num_steps = 0
        self._refused: RequestState | None = None  # waited for blocks in the last plan
        self._num_reserved: int | None = None  # blocks, of this plan; None: not counted yet
        self._drafter: Speculation | None = None
        if config.speculates:
            self._drafter = Speculation(self._requests, config, clock)

    @property
    def has_work(self) -> bool:
        """Whether another step is needed."""
        return bool(self._requests.states or self._failed or self._requests.adapters.has_unload)

    def stats(self) -> EngineStats:
        """Returns the counters of this moment."""
        return self._requests.stats()

    def check_integrity(self) -> None:
        """Raises AssertionError unless all counts agree. For tests: slow."""
        self._requests.check_integrity()

    # Public methods, in the order of a step.

    def add(self, request: Request) -> None:
        """Queues a request. The next commit fails one that can never run, naming the limits."""
        state = self._requests.add(request)
        failure = refusal(request, self._config)
        if failure is not None:
            self._failed.append(self._fail(state, failure))

    def abort(self, request_ids: Iterable[str]) -> tuple[TokenUpdate, ...]:
        """Ends these requests, between two steps; unknown ids are ignored."""
        failure = RequestFailure(code=ABORTED, message="aborted by the caller")
        updates = []
        for request_id in request_ids:
            state = self._requests.states.get(request_id)
            if state is not None:
                updates.append(self._end(state, "abort", failure))
        return tuple(updates)

    def drop_adapter(self, key: str) -> None:
        """Frees the memory of an adapter in the next step, unless a running request holds it."""
        self._requests.adapters.drop(key)

    def expire(self, now: float) -> tuple[TokenUpdate, ...]:
        """Ends the requests whose deadline has passed, between two steps. now: time.monotonic."""
        if now < self._requests.next_end:
            return ()
        expired = self._requests.take_expired(now)
        return tuple(self._end(state, "error", lateness(state.request)) for state in expired)

    def plan(self, now: float) -> StepPlan:
        """Plans the next step; `now` in epoch seconds.

        Schedules one token per decoding request, then the prompts of running requests, then
        admissions, all within one token budget. Admissions of a smaller priority come before
        prompts of a larger one.
        """
        self._yield_to_urgent()
        self._refused = self._num_reserved = None
        draft = StepDraft(self._config.max_num_batched_tokens)
        self._encoder.start_step()
        self._schedule_decodes(draft)
        if self._schedule_prefills(draft, now):
            self._admit(draft, now)
        self._num_steps += 1
        return StepPlan(
            step_id=self._num_steps,
            drop=self._requests.take_drop(),
            forget=self._encoder.take_forget(),
            unload=self._requests.adapters.take_unload(),
            load=self._requests.adapters.take_load(),
            new=tuple(draft.new),
            encode=self._encoder.take_encode(),
            scheduled=draft.scheduled,
        )

    def plan_next(self, plan: StepPlan) -> StepPlan | None:
        """Plans the step after `plan` before `plan` is committed: each of its requests decodes on,
        in the same order, from a token that the host does not have yet.

        Returns None where the next step may have anything else to do: a request to start, a prompt
        to continue, a request at its last token or already finished, a block that only preemption
        frees, drafts to try. The commit of this step skips requests that `plan` turns out to end.
        """
        has_changes = self._requests.has_drop or self._requests.adapters.has_unload
        if self._failed or has_changes or self._may_admit():
            return None
        if self._drafter is not None and self._drafter.has_drafts(plan):
            return None
        scheduled = following(plan, self._requests, self._config.block_size)
        if scheduled is None:
            return None
        self._num_steps += 1
        return StepPlan(step_id=self._num_steps, scheduled=scheduled)

    def _may_admit(self) -> bool:
        """Whether a waiting request could start in the next step, or displace a running one."""
        state = self._requests.waiting.peek()
        return state is not None and (not self._is_stuck(state) or self._is_urgent(state))

    def _is_stuck(self, state: RequestState) -> bool:
        """Whether the next request has no seat, or had no blocks in the last plan."""
        return not self._requests.has_seat or state is self._refused

    def _is_urgent(self, state: RequestState) -> bool:
        """Whether a running request has a larger priority."""
        running = self._requests.running
        return bool(running) and state.is_before(running[-1])

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> tuple[TokenUpdate, ...]:
        """Applies the results of a step; returns an update for each request that changed."""
        assert result.step_id == plan.step_id, f"result of {result.step_id} for {plan.step_id}"
        updates, self._failed = self._failed, []
        for item in plan.scheduled:
            state = self._requests.states.get(item.request_id)
            if state is None:
                continue  # the request ended after plan_next had planned this step
            failure = result.errors.get(item.request_id)
            if failure is not None:
                updates.append(self._fail(state, failure))
                continue
            self._requests.advance(state, item, len(result.later.get(item.request_id, ())))
            update = self._update(state, item, result, now)
            if update is not None:
                updates.append(update)
        if self._drafter is not None:
            self._drafter.commit(plan, result)
        return tuple(updates)

    def fail(self, plan: StepPlan, failure: RequestFailure) -> tuple[TokenUpdate, ...]:
        """Replaces `commit` when the step raised: each request of the plan ends in error.

        It is unknown how far the step got, so the next plan repeats this plan's `drop` and
        `forget`; the runner ignores ids that it does not have.
        """
        updates, self._failed = self._failed, []
        for item in plan.scheduled:
            state = self._requests.states.get(item.request_id)
            if state is not None:
                updates.append(self._fail(state, failure))
        self._requests.drop_again(plan.drop)
        self._encoder.forget_again(plan.forget)
        self._requests.adapters.unload_again(plan.unload)
        if self._drafter is not None:
            self._drafter.forget_time()
        return tuple(updates)

    def release(self, outputs: Sequence[RequestOutput]) -> None:
        """Frees the requests that delivery has ended: finished outputs that are still known
        here."""
        for output in outputs:
            state = self._requests.states.get(output.request_id) if output.finished else None
            if state is not None:
                self._requests.finish(state, output.outputs.finish_reason or "stop")

    # Planning.

    def _yield_to_urgent(self) -> None:
        """Preempts a running request for a more urgent one without a seat or blocks."""
        state = self._requests.waiting.peek()
        if state is not None and self._is_stuck(state) and self._is_urgent(state):
            self._requests.preempt(self._requests.running[-1])

    def _schedule_decodes(self, draft: StepDraft) -> None:
        drafts = {} if self._drafter is None else self._drafter.drafts(draft.num_tokens_left)
        for state in tuple(self._requests.running):
            request, own = state.request, drafts.get(state.number, ())
            num_slots = len(request.block_ids) * self._config.block_size
            has_slot = request.num_computed_tokens < num_slots
            # One that was preempted for an earlier one no longer decodes.
            if not state.is_decoding or not (has_slot or self._free_block(state)):
                continue
            end = request.num_computed_tokens + 1 + len(own)
            num_new = self._config.num_blocks_for(end) - len(request.block_ids)
            blocks = tuple(self._pool.allocate(max(0, num_new)))
            request.block_ids.extend(blocks)
            draft.add(self._requests.schedule(state, request.num_computed_tokens, end, blocks, own))

    def _free_block(self, state: RequestState) -> bool:
        """Ensures a free block, preempting the newest if need be; False when that was `state`."""
        running = self._requests.running
        while not self._pool.can_allocate(1):
            newest = running[-1]
            if newest is state and len(running) == 1:
                self._failed.append(self._fail(state, overgrowth(state.request, self._config)))
            else:
                self._requests.preempt(newest)
            if newest is state:
                return False
        return True

    def _schedule_prefills(self, draft: StepDraft, now: float) -> bool:
        """Continues prompts admitted earlier; returns whether other requests may follow."""
        for state in tuple(self._requests.running):
            if state.is_decoding:
                continue
            self._admit(draft, now, before=state)
            chunk = self._next_chunk(state, state.request.num_computed_tokens, draft)
            if chunk.num_tokens:
                self._schedule_chunk(state, chunk, draft)
            elif chunk.waits_for_encoder:
                self._encoder.close_step()
            else:
                return False  # it waits for tokens, which a younger request would take
        return True

    def _next_chunk(self, state: RequestState, start: int, draft: StepDraft) -> Chunk:
        num_tokens = draft.num_tokens_left
        if self._rows is not None:
            num_tokens = tokens_to_border(state, start, num_tokens, self._config)
        return next_chunk(state.request, start, num_tokens, self._config, self._encoder)

    def _schedule_chunk(
        self, state: RequestState, chunk: Chunk, draft: StepDraft, blocks: tuple[int, ...] = ()
    ) -> None:
        self._encoder.hold(state.request.request_id, chunk.media)
        draft.add(self._requests.schedule(state, chunk.start, chunk.end, blocks))
        if chunk.waits_for_encoder:
            self._encoder.close_step()

    def _admit(self, draft: StepDraft, now: float, before: RequestState | None = None) -> None:
        """Starts waiting requests, strictly in order: none overtakes one that has to wait, except
        for a prefix. before: only those of a smaller priority than this one's."""
        with closing(startable(self._requests, self._config, before)) as states:
            for state in states:
                if not (draft.num_tokens_left and self._try_admit(state, draft, now)):
                    return

    def _try_admit(self, state: RequestState, draft: StepDraft, now: float) -> bool:
        """Starts a request with blocks for all its known tokens, so that only decoding preempts."""
        request = state.request
        matched = matched_blocks(state, self._requests, self._config)
        num_new = self._config.num_blocks_for(request.num_tokens) - len(matched)
        size = self._config.block_size
        if self._num_reserved is None:
            self._num_reserved = num_reserved_blocks(self._requests.running, size)
        windows = self._requests.windows
        has_window = windows is None or windows.can_start(state)
        needed, adapters = num_new + self._num_reserved, self._requests.adapters
        has_adapter = request.adapter is None or adapters.can_hold(request.adapter)
        if not (has_adapter and has_window and self._pool.can_allocate(needed, matched)):
            self._refused = state
            return False
        chunk = self._next_chunk(state, len(matched) * size, draft)
        if not chunk.num_tokens:
            if chunk.waits_for_encoder and request.has_media_outside:
                self._refused = state  # running requests hold such items until they end
            return False
        self._requests.start(state, matched, num_new, now)
        self._num_reserved += may_grow(state, size)
        if self._drafter is not None:
            self._drafter.start(state)
        draft.new.append(state.to_new_request())
        self._schedule_chunk(state, chunk, draft, tuple(request.block_ids))
        return True

    # Committing.

    def _update(
        self, state: RequestState, item: ScheduledTokens, result: StepResult, now: float
    ) -> TokenUpdate | None:
        request = state.request
        if request.wanted is not None:
            if not state.end_prompt(now):
                return None
            self._requests.finish(state, "stop")
            vector = result.vectors[item.request_id]
            return TokenUpdate(request=request, finish_reason="stop", vector=vector)
        prompt_logprobs = result.prompt_logprobs.get(item.request_id, ())
        if prompt_logprobs:
            prompt_logprobs = state.fresh_logprobs(prompt_logprobs)
        if not item.samples:
            update = TokenUpdate(request=request, prompt_logprobs=prompt_logprobs)
            return update if prompt_logprobs else None
        before = len(request.output_token_ids)
        finish_reason = state.append_all(result, now)
        new_token_ids = tuple(request.output_token_ids[before:])
        self._requests.num_generated_tokens += len(new_token_ids)
        if finish_reason is not None:
            self._requests.finish(state, finish_reason)
        elif request.num_tokens == state.next_end:
            self._lengthen(state)
        return TokenUpdate(
            request=request,
            new_token_ids=new_token_ids,
            logprobs=result.logprobs.get(item.request_id, ())[: len(new_token_ids)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            attention=result.attention.get(item.request_id),
        )

    def _lengthen(self, state: RequestState) -> None:
        """Computes a request again that has grown long for its model. It fails where no block is
        left for its last token even when it runs alone."""
        if self._config.num_blocks_for(state.request.num_tokens) > self._config.num_blocks:
            self._failed.append(self._fail(state, overgrowth(state.request, self._config)))
        else:
            self._requests.lengthen(state)

    def _fail(self, state: RequestState, failure: RequestFailure) -> TokenUpdate:
        self._encoder.discard(state.request.request_id)  # its media may be the cause
        update = self._end(state, "error", failure)
        if state.request.adapter is not None:  # its files may be the cause
            self._requests.adapters.drop(state.request.adapter.key)
        return update

    def _end(
        self, state: RequestState, reason: FinishReason, failure: RequestFailure
    ) -> TokenUpdate:
        self._requests.finish(state, reason)
        return TokenUpdate(request=state.request, finish_reason=reason, failure=failure)
