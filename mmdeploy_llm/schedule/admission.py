"""Admission: the blocks that a waiting request can start with, and those that it must leave."""

from __future__ import annotations

from collections.abc import Iterable

from .blocks import BlockPool
from .chunks import whole_spans_end
from .limits import SchedulerConfig
from .state import RequestState
from .states import StateRows


def matched_blocks(
    state: RequestState, pool: BlockPool, rows: StateRows | None, config: SchedulerConfig
) -> list[int]:
    """Returns the blocks of the prefix cache that the request can start with."""
    if state.request.params.prompt_logprobs is not None:
        return []  # needs the logits of all prompt tokens
    matched = pool.match(state.keys, state.request.num_tokens)
    if config.atomic_media:
        # A span is computed whole or read whole from the cache.
        block_size, end = config.block_size, len(matched) * config.block_size
        while (whole := whole_spans_end(state.request, 0, end)) < end:
            end = whole // block_size * block_size
        del matched[end // block_size :]
    return matched if rows is None else rows.match(state, matched)


def num_reserved_blocks(running: Iterable[RequestState], block_size: int) -> int:
    """Returns how many blocks an admission leaves free: one per running request that may grow,
    which would otherwise preempt it soon after."""
    return sum(
        len(state.request.block_ids) * block_size < state.max_num_tokens - 1 for state in running
    )
