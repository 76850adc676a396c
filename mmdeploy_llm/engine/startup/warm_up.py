"""Makes step plans of made-up requests, to warm a runner up and to measure its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens, StepPlan, StepResult
from mmdeploy_llm.values.pooling_request import PoolingRequest

logger = logging.getLogger(__name__)

RunStep = Callable[[StepPlan], StepResult]
Params = Mapping[str, Any]
GREEDY: Params = MappingProxyType(
    {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 2,
        "seed": 0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
)


def warm_up(
    run: RunStep, num_tokens: int, block_size: int, wanted: PoolingRequest | None = None
) -> None:
    """Runs one small prefill and one decode step, so that the first real request finds kernels and
    buffers ready; of a model that generates nothing, a prefill alone. Uses block 0, before any
    request has it. A failure is logged. wanted: see Request."""
    count = max(1, min(num_tokens, block_size - 1))
    plan = prefill([count], [0], block_size, wanted=wanted)
    name = plan.new[0].request_id
    result = run(plan)
    if not result.errors and wanted is None:
        decode = ScheduledTokens(request_id=name, start=count, num_tokens=1)
        result = run(StepPlan(step_id=0, scheduled=(decode,)))
    run(StepPlan(step_id=0, drop=(name,)))
    for failure in result.errors.values():
        logger.warning("the warm-up step failed: %s", failure.message)


def prefill(
    lengths: Sequence[int],
    blocks: Sequence[int],
    block_size: int,
    params: Params = GREEDY,
    wanted: PoolingRequest | None = None,
    token_ids: Sequence[int] | None = None,
) -> StepPlan:
    """Returns a step with a new request of each length. All use the same blocks, since nobody reads
    what they compute. token_ids: as many as the longest has; None: 0."""
    new, scheduled = [], []
    for index, length in enumerate(lengths):
        name = f"startup-{index}"
        new.append(
            NewRequest(
                request_id=name,
                token_ids=tuple((token_ids or (0,) * length)[:length]),
                prompt_len=length,
                params=SamplingParams(**params),
                eos_token_ids=frozenset(),
                wanted=wanted,
            )
        )
        own = tuple(blocks[: -(-length // block_size)])
        scheduled.append(
            ScheduledTokens(
                request_id=name,
                start=0,
                num_tokens=length,
                new_block_ids=own,
                new_window_ids=own,
                samples=wanted is None,
            )
        )
    return StepPlan(step_id=0, new=tuple(new), scheduled=tuple(scheduled))
