"""Steps on requests of our own, before the first real one: to warm up, and to see how much memory
the largest steps take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.plan import NewRequest, ScheduledTokens, StepPlan, StepResult
from mmdeploy_llm.request import MediaInput

from .kv_cache import available_memory

logger = logging.getLogger(__name__)

RunStep = Callable[[StepPlan], StepResult]
Params = Mapping[str, Any]
NEUTRAL: Params = MappingProxyType(
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
# Drawn, behind penalties: with all that the sampler makes for them, some of it to stay.
COSTLY: Params = MappingProxyType({**NEUTRAL, "temperature": 1.0, "repetition_penalty": 1.1})


def warm_up(run: RunStep, num_tokens: int, block_size: int) -> None:
    """One small prefill and one decode step, so that the first real request finds kernels and
    buffers ready. Uses block 0, before any request has it."""
    count = max(1, min(num_tokens, block_size - 1))
    plan = prefill([count], [0], block_size)
    name = plan.new[0].request_id
    result = run(plan)
    if not result.errors:
        decode = ScheduledTokens(request_id=name, start=count, num_tokens=1)
        result = run(StepPlan(step_id=0, scheduled=(decode,)))
    run(StepPlan(step_id=0, drop=(name,)))
    for failure in result.errors.values():
        logger.warning("the warm-up step failed: %s", failure.message)


class Meter(Protocol):
    """Measures the memory of a device, in bytes."""

    def start(self) -> None:
        """Peaks count from now on."""
        ...

    def peak(self) -> int:
        """The most that was taken at a time since `start`, beyond what was taken then."""
        ...

    def available(self) -> int:
        """What may still be taken now."""
        ...


class CudaMeter:
    """Of a card, of which `utilization` is ours. What the allocator took from the card counts, so
    that the gaps between tensors do too."""

    def __init__(self, device: torch.device, utilization: float) -> None:
        self._device = device
        self._utilization = utilization
        self._at_start = 0

    def start(self) -> None:
        """See Meter."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._at_start = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """See Meter."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - self._at_start

    def available(self) -> int:
        """See Meter."""
        torch.cuda.empty_cache()
        return available_memory(self._device, self._utilization)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """The largest that may come. num_tokens, num_seqs: in one step. max_model_len: of one request.
    block_size: of the KV cache. media: for one call of the encoder. kept_bytes: that encoder
    outputs take between steps."""

    num_tokens: int
    num_seqs: int
    max_model_len: int
    block_size: int
    media: tuple[MediaInput, ...] = ()
    kept_bytes: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest request of one step."""
        return min(self.num_tokens, self.max_model_len - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes beside weights and KV cache. step: the most of any step. decode: of a decode step of
    the largest batch, which captured graphs keep for themselves."""

    step: int
    decode: int


def measure(run: RunStep, largest: LargestStep, meter: Meter) -> StepMemory:
    """The peaks of the largest steps: media and one long prompt, as many prompts as may run, and a
    decode of them all. The KV cache needs to hold one request of `largest.longest` tokens only: all
    use the same blocks, since nobody reads what comes of it. The log says where a step fails."""
    num_long, rest = divmod(largest.num_tokens, largest.longest)
    lengths = ([largest.longest] * num_long + [rest] * bool(rest))[: largest.num_seqs]
    num_each = min(largest.num_tokens // largest.num_seqs, largest.longest)
    meter.start()
    _run_alone(run, lengths, largest, media=largest.media)
    _run_alone(run, [num_each] * largest.num_seqs, largest)
    step = meter.peak()
    meter.start()
    _run_alone(run, [1] * largest.num_seqs, largest, params=NEUTRAL)
    return StepMemory(step=step, decode=meter.peak())


def _run_alone(
    run: RunStep,
    lengths: Sequence[int],
    largest: LargestStep,
    *,
    media: tuple[MediaInput, ...] = (),
    params: Params = COSTLY,
) -> None:
    """A step with prompts of these lengths, and one that forgets them."""
    blocks = tuple(range(-(-largest.longest // largest.block_size)))
    plan = prefill(lengths, blocks, largest.block_size, params)
    result = run(replace(plan, encode=media))
    names = tuple(new.request_id for new in plan.new)
    run(StepPlan(step_id=0, drop=names, forget=tuple(item.key for item in media)))
    for failure in result.errors.values():
        logger.warning("a step to measure its memory failed: %s", failure.message)
        break


def prefill(
    lengths: Sequence[int], blocks: Sequence[int], block_size: int, params: Params = NEUTRAL
) -> StepPlan:
    """A step with a new request of each of the lengths, all in the same blocks."""
    new, scheduled = [], []
    for number, length in enumerate(lengths):
        name = f"trial-{number}"
        new.append(
            NewRequest(
                request_id=name,
                token_ids=(0,) * length,
                prompt_len=length,
                params=SamplingParams(**params),
                eos_token_ids=frozenset(),
            )
        )
        own = tuple(blocks[: -(-length // block_size)])
        scheduled.append(
            ScheduledTokens(request_id=name, start=0, num_tokens=length, new_block_ids=own)
        )
    return StepPlan(step_id=0, new=tuple(new), scheduled=tuple(scheduled))


def cache_memory(memory: StepMemory, largest: LargestStep, available: int, has_graphs: bool) -> int:
    """Bytes for the KV cache: what is available now less what the steps take. Raises ConfigError
    when nothing is left."""
    graphs = memory.decode if has_graphs else 0
    left = available - memory.step - graphs - largest.kept_bytes
    logger.info(
        "memory beside the weights: %.2f GiB; the largest step takes %.2f, graphs %.2f, cached "
        "media %.2f, the KV cache %.2f",
        *(size / 2**30 for size in (available, memory.step, graphs, largest.kept_bytes, left)),
    )
    if left <= 0:
        raise ConfigError(
            f"{available / 2**30:.2f} GiB are left beside the weights, and steps of "
            f"{largest.num_tokens} tokens with their media take "
            f"{(available - left) / 2**30:.2f}, so that nothing is left for the KV cache; lower "
            "max_num_batched_tokens, max_num_seqs or encoder_cache_memory, bound the size of media "
            "(mm_processor_kwargs), or raise gpu_memory_utilization"
        )
    return left
