"""Schedules the step after one whose tokens are not known yet."""

from __future__ import annotations

from mmdeploy_llm.values.plan import ScheduledTokens, StepPlan

from .lifecycle import Lifecycle


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
