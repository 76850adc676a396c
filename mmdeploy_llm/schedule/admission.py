"""Admission: which cached blocks a waiting request starts with, and how many it leaves free."""

from __future__ import annotations

from collections.abc import Iterable

from .chunks import whole_runs_end
from .lifecycle import Lifecycle
from .limits import SchedulerConfig
from .state import RequestState


def matched_blocks(state: RequestState, requests: Lifecycle, config: SchedulerConfig) -> list[int]:
    """Returns the blocks of the prefix cache that the request can start with."""
    if state.request.params.prompt_logprobs is not None:
        return []  # needs the logits of all prompt tokens
    matched = requests.pool.match(state.keys, state.request.num_tokens)
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
        count = _whole_blocks(state, count, config.block_size)
    if requests.windows is not None:
        count = requests.windows.match(state, count)
    return matched[:count] if requests.rows is None else requests.rows.match(state, matched[:count])


def _whole_blocks(state: RequestState, count: int, block_size: int) -> int:
    """Returns how many of the first `count` blocks end outside of runs of embeddings: a run is
    computed whole, or read whole from the cache."""
    end = count * block_size
    while (whole := whole_runs_end(state.request, 0, end)) < end:
        end = whole // block_size * block_size
    return end // block_size


def num_reserved_blocks(running: Iterable[RequestState], block_size: int) -> int:
    """Returns how many blocks an admission leaves free: one per running request that may grow,
    which would otherwise preempt it soon after."""
    return sum(
        len(state.request.block_ids) * block_size < state.max_num_tokens - 1 for state in running
    )
