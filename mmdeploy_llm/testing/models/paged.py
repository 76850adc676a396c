"""Runs a model with the real scheduler, runner and paged cache on the reference attention, without
tokenizer and delivery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mmdeploy_llm.caches import State, layer_caches, longest_window
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.engine.runner.slots import Slots
from mmdeploy_llm.engine.runner.states import StateTable
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.hooks.objects.attention import AttentionBackend
from mmdeploy_llm.kernels import TORCH
from mmdeploy_llm.kernels.cpu import CpuKernels
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape, allocate
from mmdeploy_llm.layers.attention.native import NativeAttention
from mmdeploy_llm.layers.attention.reference import ReferenceAttention
from mmdeploy_llm.layers.attention.windows import WindowAttention
from mmdeploy_llm.request import MediaSpan, Request
from mmdeploy_llm.values.outputs.request_output import TokenLogprobs
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NUM_FIXED, TokenUpdate

from .base import CheckFailed

BLOCK_SIZE = 4
MAX_NUM_SEQS = 8
MAX_IDLE_STATES = 16
MAX_OUTPUT = 64  # tokens that a sequence may generate

Prompt = tuple[Sequence[int], Sequence[MediaSpan]]


@dataclass(slots=True)
class Generated:
    """The result of one prompt. logprobs: of each generated token. prompt_logprobs: of each prompt
    token except the first."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0


class PagedRunner:
    """Drives one model with an engine's scheduler and runner, greedily.

    longest: length of the longest prompt in tokens.
    encoder_cache_tokens: capacity for embeddings of media.
    num_blocks: number of KV blocks of BLOCK_SIZE tokens; None allocates enough for all sequences.
    max_num_batched_tokens: limit of tokens per step.
    """

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        longest: int,
        encoder_cache_tokens: int,
        has_atomic_media: bool = False,
        num_blocks: int | None = None,
        max_num_batched_tokens: int = 4096,
    ) -> None:
        max_model_len = longest + MAX_OUTPUT
        most_blocks = MAX_NUM_SEQS * (max_model_len // BLOCK_SIZE + 1)
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max(max_num_batched_tokens, MAX_NUM_SEQS),
            max_model_len=max_model_len,
            num_blocks=num_blocks or most_blocks,
            block_size=BLOCK_SIZE,
            encoder_cache_tokens=max(1, encoder_cache_tokens),
            atomic_media=has_atomic_media,
            num_state_rows=num_state_rows(model),
            max_idle_states=MAX_IDLE_STATES,
            window=longest_window(model),
            long_after=getattr(model, "long_after", None),
            num_window_blocks=most_blocks,
        )
        self._scheduler = Scheduler(config)
        self._runner = cpu_runner(model, config, vocab_size)
        self._num_prompts = 0

    def generate(
        self, prompts: Sequence[Prompt], num_tokens: int, *, has_prompt_logprobs: bool = True
    ) -> list[Generated]:
        """Generates `num_tokens` greedy tokens for each prompt, all prompts concurrently.

        has_prompt_logprobs: computes the whole prompt, so that the prefix cache is not used.
        Raises CheckFailed when the model fails on a prompt.
        """
        found: dict[str, Generated] = {}
        for prompt in prompts:
            params = greedy(num_tokens, 0 if has_prompt_logprobs else None)
            request = self._request(prompt, params)
            found[request.request_id] = Generated()
            self._scheduler.add(request)
        while self._scheduler.has_work:
            plan = self._scheduler.plan(0.0)
            result = self._runner.run(plan)
            for request_id, entries in result.prompt_logprobs.items():
                found[request_id].prompt_logprobs += _values(entries)
            for update in self._scheduler.commit(plan, result, 0.0):
                _take(update, found[update.request.request_id])
        return list(found.values())

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        ids, media = prompt
        self._num_prompts += 1
        return Request(
            request_id=str(self._num_prompts),
            prompt=None,
            prompt_token_ids=list(ids),
            params=params,
            media=tuple(media),
            arrival_time=float(self._num_prompts),
        )


def num_state_rows(model: Any) -> int:
    """Returns SchedulerConfig.num_state_rows of a model."""
    has_states = any(isinstance(layer, State) for layer in layer_caches(model))
    return NUM_FIXED + 2 * MAX_NUM_SEQS + MAX_IDLE_STATES if has_states else 0


def cpu_runner(
    model: Any,
    config: SchedulerConfig,
    vocab_size: int,
    *,
    kernels: CpuKernels | None = None,
    dtype: torch.dtype = torch.float32,
) -> Runner:
    """Returns a runner with the KV cache of a config. dtype: of the cache. kernels: for attention
    and sampling; None: plain torch."""
    device = torch.device("cpu")
    shape = KVCacheShape(layers=layer_caches(model), block_size=config.block_size, dtype=dtype)
    windows = shape.windows

    def new_backend() -> AttentionBackend:
        return ReferenceAttention() if kernels is None else NativeAttention(kernels)

    return Runner(
        model=model,
        backend=WindowAttention(new_backend, windows) if windows else new_backend(),
        cache=allocate(shape, config.num_blocks, device, config.num_window_blocks),
        sampler=Sampler(
            max_num_slots=config.max_num_seqs,
            vocab_size=vocab_size,
            device=device,
            kernels=kernels or TORCH,
        ),
        slots=Slots(
            config.max_num_seqs,
            config.max_model_len,
            config.block_size,
            has_windows=bool(windows),
            long_after=config.long_after,
        ),
        device=device,
        has_atomic_media=config.atomic_media,
        states=StateTable(shape, config.num_state_rows, device) if config.num_state_rows else None,
    )


def greedy(num_tokens: int, prompt_logprobs: int | None) -> SamplingParams:
    """Returns resolved params of greedy decoding with log-probabilities."""
    return SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=0,
        max_tokens=num_tokens,
        logprobs=0,
        prompt_logprobs=prompt_logprobs,
    )


def _values(entries: Sequence[TokenLogprobs | None]) -> list[float]:
    """Returns the log-probability of each token itself, which is the first of its entry."""
    return [next(iter(entry.values())).logprob for entry in entries if entry is not None]


def _take(update: TokenUpdate, generated: Generated) -> None:
    if update.failure is not None:
        raise CheckFailed(
            f"in the paged runner {update.failure.message}; forward must accept any mix of "
            "sequences and return [tokens, hidden] in their order"
        )
    generated.token_ids += update.new_token_ids
    generated.logprobs += _values(update.logprobs)
    generated.num_cached_tokens = update.request.num_cached_tokens
    generated.num_preemptions = update.request.num_preemptions
