"""Admission: which cached blocks a waiting request starts with, if it need not wait for others, and
how many it leaves free."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from mmdeploy_llm.request import Request

from .chunks import whole_runs_end
from .lifecycle import Lifecycle
from .limits import SchedulerConfig
from .state import RequestState


def num_matchable(request: Request) -> int:
    """Returns how many tokens of a request the prefix cache may hold, one more than it gives: some
    need the states of their prompt's tokens, which no cache has."""
    if request.params.prompt_logprobs is not None:
        return 1
    if request.wanted is not None:
        return request.wanted.first_needed(request.num_tokens) + 1
    if request.heads:  # of which each token of the answer is computed
        return len(request.prompt_token_ids)
    return request.num_tokens


def matched_blocks(state: RequestState, requests: Lifecycle, config: SchedulerConfig) -> list[int]:
    """Returns the blocks of the prefix cache that the request can start with."""
    matched = requests.pool.match(state.keys, num_matchable(state.request))
    while matched and (shorter := _shortened(matched, state, requests, config)) != matched:
        matched = shorter  # on which all conditions must agree
    return matched


def _shortened(
    matched: list[int], state: RequestState, requests: Lifecycle, config: SchedulerConfig
) -> list[int]:
    """Returns the first of the cached blocks, up to where media, windows and states allow a request
    to start."""
    count = len(matched)
    if config.atomic_media:
        count = _whole_blocks(state, count, config)
    if requests.windows is not None:
        count = requests.windows.match(state, count)
    return matched[:count] if requests.rows is None else requests.rows.match(state, matched[:count])


def _whole_blocks(state: RequestState, count: int, config: SchedulerConfig) -> int:
    """Returns how many of the first `count` blocks a request with atomic media can start after.

    The end of a run of embeddings may be computed on its cached begin, which was computed with the
    whole run. Not from a state, which none is kept of within a run, and not where a layer's window
    has left the begin.
    """
    end = count * config.block_size
    while (begin := whole_runs_end(state.request, 0, end)) < end:
        is_visible = config.window is None or begin > end - config.window
        if is_visible and not config.num_state_rows:
            break
        end = begin // config.block_size * config.block_size
    return end // config.block_size


def startable(
    requests: Lifecycle, config: SchedulerConfig, before: RequestState | None = None
) -> Generator[RequestState, None, None]:
    """Yields the waiting requests in order, each until the caller has started it. One whose next
    block is being computed is passed over. before: only those of a smaller priority than its."""
    aside: list[RequestState] = []
    try:
        while requests.has_seat and (state := requests.waiting.peek()) is not None:
            if before is not None and not state.is_before(before):
                return
            if _is_coming(state, requests, config):
                aside.append(requests.waiting.pop())
            else:
                yield state
    finally:
        for state in aside:
            requests.waiting.push(state)


def _is_coming(state: RequestState, requests: Lifecycle, config: SchedulerConfig) -> bool:
    """Whether a running request computes the next block of a shared prompt: the request then waits
    for it, at most until that prompt is computed."""
    request = state.request
    if not (request.is_shared and config.enable_prefix_caching):
        return False
    num_tokens = num_matchable(request)
    index = len(requests.pool.match(state.keys, num_tokens))
    end = (index + 1) * config.block_size
    return end < num_tokens and any(
        other.request.num_computed_tokens < end <= len(other.request.prompt_token_ids)
        and other.keys.key(index) == state.keys.key(index)
        for other in requests.running
        if other.request.is_shared
    )


def num_reserved_blocks(running: Iterable[RequestState], block_size: int) -> int:
    """Returns how many blocks an admission leaves free: one per running request that may grow,
    which would otherwise preempt it soon after."""
    return sum(may_grow(state, block_size) for state in running)


def may_grow(state: RequestState, block_size: int) -> bool:
    """Whether a running request may need another block before it ends."""
    return len(state.request.block_ids) * block_size < state.max_num_tokens - 1
