"""Measures the memory of the worst case: runs the largest steps that the limits allow once, with
made-up requests. The KV cache must leave their peak free."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.request import MediaInput
from mmdeploy_llm.values.plan import StepPlan
from mmdeploy_llm.values.pooling_request import PoolingRequest

from .sizes import available_memory
from .warm_up import GREEDY, Params, RunStep, prefill

logger = logging.getLogger(__name__)

# Sampling with penalties, for which the sampler allocates the most; some of it stays allocated.
COSTLY: Params = MappingProxyType({**GREEDY, "temperature": 1.0, "repetition_penalty": 1.1})


class Meter(Protocol):
    """Measures the memory of a device, in bytes."""

    def start(self) -> None:
        """Starts to measure a new peak."""

    def peak(self) -> int:
        """Returns the peak bytes allocated since `start`, above the level at `start`."""

    def available(self) -> int:
        """Returns the bytes that may still be allocated now."""


class CudaMeter:
    """Measures a card of which this engine may use the share `utilization`. Counts the memory that
    torch's allocator has reserved, so that gaps between tensors count too."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        self._device = device
        self._utilization = utilization
        self._at_start = 0

    def start(self) -> None:
        """Waits for the device, releases unused memory, and starts to measure a new peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._at_start = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """Returns the peak bytes reserved since `start`, above the level at `start`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._at_start

    def available(self) -> int:
        """Releases unused memory, and returns the bytes that may still be allocated now."""
        torch.cuda.empty_cache()
        return available_memory(self._device, self._utilization)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """The upper bounds of a step.

    num_tokens, num_seqs: tokens and requests in one step.
    max_model_len: tokens of one request.
    block_size: tokens of a KV cache block.
    media: items of one encoder call.
    kept_bytes: encoder outputs kept between steps. wanted: see Request.
    """

    num_tokens: int
    num_seqs: int
    max_model_len: int
    block_size: int
    media: tuple[MediaInput, ...] = ()
    kept_bytes: int = 0
    wanted: PoolingRequest | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest request of one step."""
        return min(self.num_tokens, self.max_model_len - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Peak bytes besides weights and KV cache. step: in any step. decode: in a decode step of the
    largest batch; captured CUDA graphs keep as much for themselves."""

    step: int
    decode: int


def measure(run: RunStep, largest: LargestStep, meter: Meter) -> StepMemory:
    """Runs the largest steps and returns their peaks: media with one long prompt, as many prompts
    as may run, and a decode of them all. The KV cache needs to hold one request of
    `largest.longest` tokens only, since all use the same blocks. A step that fails is logged."""
    num_long, rest = divmod(largest.num_tokens, largest.longest)
    lengths = ([largest.longest] * num_long + [rest] * bool(rest))[: largest.num_seqs]
    num_each = min(largest.num_tokens // largest.num_seqs, largest.longest)
    meter.start()
    _run_once(run, lengths, largest, media=largest.media)
    _run_once(run, [num_each] * largest.num_seqs, largest)
    step = meter.peak()
    meter.start()
    _run_once(run, [1] * largest.num_seqs, largest, params=GREEDY)
    return StepMemory(step=step, decode=meter.peak())


def _run_once(
    run: RunStep,
    lengths: Sequence[int],
    largest: LargestStep,
    *,
    media: tuple[MediaInput, ...] = (),
    params: Params = COSTLY,
) -> None:
    """Runs a step with prompts of these lengths, then one that drops them."""
    blocks = tuple(range(-(-largest.longest // largest.block_size)))
    plan = prefill(lengths, blocks, largest.block_size, params, largest.wanted)
    result = run(replace(plan, encode=media))
    names = tuple(new.request_id for new in plan.new)
    run(StepPlan(step_id=0, drop=names, forget=tuple(item.key for item in media)))
    for failure in result.errors.values():
        logger.warning("a step that measures memory failed: %s", failure.message)
        break


def cache_memory(memory: StepMemory, largest: LargestStep, available: int, has_graphs: bool) -> int:
    """Returns the bytes for the KV cache: what is available now, less what the steps need. Raises
    ConfigError when nothing is left."""
    graphs = memory.decode if has_graphs else 0
    left = available - memory.step - graphs - largest.kept_bytes
    logger.info(
        "memory besides the weights: %.2f GiB; the largest step needs %.2f, graphs %.2f, cached "
        "media %.2f, the KV cache gets %.2f",
        *(size / 2**30 for size in (available, memory.step, graphs, largest.kept_bytes, left)),
    )
    if left <= 0:
        raise ConfigError(
            f"{available / 2**30:.2f} GiB are left besides the weights, and steps of "
            f"{largest.num_tokens} tokens with their media need "
            f"{(available - left) / 2**30:.2f}, so that nothing is left for the KV cache; lower "
            "max_num_batched_tokens, max_num_seqs or encoder_cache_memory, bound the size of media "
            "(mm_processor_kwargs), or raise gpu_memory_utilization"
        )
    return left
