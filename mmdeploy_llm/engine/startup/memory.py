"""Decides how much memory the KV cache gets: on CUDA what the largest steps leave, on a CPU a share
of the free memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

import torch

from mmdeploy_llm.engine.runner.encoder_cache import values_per_call
from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, Model
from mmdeploy_llm.hooks.objects.model import cross_of, media_size
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape
from mmdeploy_llm.layers.pooling.abilities import abilities_of
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.system.sharding.peers import Peers
from mmdeploy_llm.values.options.runtime_config import MEDIA_LIMIT_DEFAULT, RuntimeConfig
from mmdeploy_llm.values.plan import NUM_FIXED

from .loaded import LoadedModel
from .media import build_processors
from .runners import CachePlan, new_runner
from .sizes import (
    count_blocks,
    count_state_rows,
    count_window_blocks,
    cpu_cache_memory,
    kv_cache_shape,
)
from .worst_case import CudaMeter, LargestStep, Meter, cache_memory, measure

logger = logging.getLogger(__name__)

MAPPED_SHARE = 16  # of free RAM that pages of weights leave, which are read again when it is little
MIN_MEDIA = 1024  # tokens: media items of at most this size are not reduced further


def plan_cache(loaded: LoadedModel) -> CachePlan:
    """Returns the KV cache that the memory holds, the same on all ranks. Raises ConfigError when it
    is too small, or smaller than the options require.

        memory    [ states | blocks of the layers with a window | blocks of the other layers ]

    The first two take what the running sequences need and keep some for prefixes, up to a share of
    the memory; the last one takes the rest. The rank with the least memory decides.
    """
    runtime = loaded.runtime
    shape = kv_cache_shape(loaded.model, runtime)
    memory = runtime.kv_cache_memory_bytes
    num_blocks = runtime.num_blocks_override
    if memory is None and (num_blocks is None or shape.bytes_per_state):
        memory = _cuda_memory(loaded, shape) if _is_cuda(loaded) else _cpu_memory(loaded)
    num_state_rows = count_state_rows(shape, memory or 0, runtime)
    if shape.bytes_per_state:
        num_state_rows = loaded.group.least(num_state_rows)
    if memory is not None:
        memory -= num_state_rows * shape.bytes_per_state
    num_window_blocks = count_window_blocks(shape, memory, runtime)
    if num_window_blocks:
        num_window_blocks = loaded.group.least(num_window_blocks)
    if num_blocks is None:
        assert memory is not None, "set above"
        blocks_each = -(-runtime.max_model_len // runtime.block_size)  # more are never used
        memory -= num_window_blocks * shape.bytes_per_window_block
        num_blocks = count_blocks(shape, memory, runtime.max_num_seqs * blocks_each)
        num_blocks = loaded.group.least(num_blocks)
    if num_state_rows:
        logger.info(
            "%d states of %.1f MiB, %d of them for prefixes that no request uses",
            num_state_rows,
            shape.bytes_per_state / 2**20,
            num_state_rows - NUM_FIXED - 2 * runtime.max_num_seqs,
        )
    max_model_len = fitting_length(runtime, num_blocks)
    return CachePlan(
        shape=shape,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        num_state_rows=num_state_rows,
        num_window_blocks=num_window_blocks,
    )


def _is_cuda(loaded: LoadedModel) -> bool:
    return loaded.device.type == "cuda"


def _cpu_memory(loaded: LoadedModel) -> int:
    free = free_ram()
    left = max(free - loaded.mapped_bytes, free // MAPPED_SHARE)
    return cpu_cache_memory(left) // loaded.group.size


def _cuda_memory(loaded: LoadedModel, shape: KVCacheShape) -> int:
    runtime = loaded.runtime
    return measured_memory(
        lambda count: new_runner(loaded, CachePlan.of_trial(shape, count, runtime.max_model_len)),
        build_processors(loaded.files, runtime.options),
        runtime,
        loaded.model,
        CudaMeter(loaded.device, runtime.gpu_memory_utilization),
        loaded.group.peers,
    )


def measured_memory(
    new_runner: Callable[[int], Runner],
    processors: Mapping[str, MediaProcessor],
    runtime: RuntimeConfig,
    model: Model,
    meter: Meter,
    peers: Peers,
) -> int:
    """Runs steps as large as the limits allow and returns the bytes they leave for the KV cache.

    new_runner: returns a runner with this many KV cache blocks, for these steps only.
    processors: by kind; closed afterwards. Where a step with their largest items would take more
    than half of the memory, on any rank, smaller items are measured and a warning is logged.
    Raises ConfigError when nothing is left.
    """
    max_media_tokens = runtime.encoder_cache_tokens
    if cross_of(model) is None:  # they stand in the sequence
        max_media_tokens = min(max_media_tokens, runtime.max_model_len - 2)
    with closing(ModelMedia(processors=processors)):
        while True:
            largest = largest_step(processors, runtime, model, max_media_tokens)
            # All requests of these steps write to the blocks of the longest one.
            runner = new_runner(-(-largest.longest // largest.block_size))
            memory = measure(runner.run, largest, meter)
            del runner
            gc.collect()  # its KV cache counts as available
            available = meter.available()
            is_fine = peers.agree(2 * memory.step <= available)  # leaves half for the cache
            if not largest.media or max_media_tokens <= MIN_MEDIA or is_fine:
                break
            max_media_tokens //= 4
            logger.warning(
                "the largest media would take %.2f of %.2f GiB; items of more than %d tokens may "
                "find no memory and fail alone: bound their size (mm_processor_kwargs), or "
                "max_model_len",
                memory.step / 2**30,
                available / 2**30,
                max_media_tokens,
            )
    return cache_memory(memory, largest, available, not runtime.enforce_eager)


def largest_step(
    processors: Mapping[str, MediaProcessor],
    runtime: RuntimeConfig,
    model: Model,
    max_media_tokens: int,
) -> LargestStep:
    """Returns the upper bounds of a step. processors: by kind. max_media_tokens: upper bound of the
    tokens of one media item."""
    media: list[MediaInput] = []
    for kind, processor in processors.items():
        item = None
        if runtime.limit_mm_per_prompt.get(kind, MEDIA_LIMIT_DEFAULT):
            item = processor.largest(max_media_tokens)
        if item is not None:
            media += _one_call(item, runtime)
    embed_bytes = media_size(model) * getattr(torch, runtime.dtype).itemsize
    return LargestStep(
        num_tokens=runtime.max_num_batched_tokens,
        num_seqs=runtime.max_num_seqs,
        max_model_len=runtime.max_model_len,
        block_size=runtime.block_size,
        media=tuple(media),
        kept_bytes=runtime.encoder_cache_tokens * embed_bytes if processors else 0,
        wanted=abilities_of(model).trial,
    )


def _one_call(item: MediaInput, runtime: RuntimeConfig) -> list[MediaInput]:
    """Returns as many copies of the item as one encoder call may have, each with its own key."""
    # The encoder takes items until it has this many values, or until a step has enough tokens.
    num_values = sum(tensor.numel() for tensor in item.tensors.values())
    by_values = values_per_call(torch.device(runtime.device)) // max(1, num_values)
    by_tokens = runtime.max_num_batched_tokens // item.num_tokens
    count = max(1, min(by_values, by_tokens))
    return [replace(item, key=f"startup-{index}-{item.key}") for index in range(count)]


def fitting_length(runtime: RuntimeConfig, num_blocks: int) -> int:
    """Returns a max_model_len that the KV cache can hold, reduced when the engine chose it. Raises
    ConfigError when the user asked for more."""
    num_tokens = num_blocks * runtime.block_size
    if runtime.max_model_len <= num_tokens:
        return runtime.max_model_len
    asked = runtime.options.max_model_len
    if asked is not None and runtime.num_blocks_override is None:
        raise ConfigError(
            f"max_model_len = {asked}, but the KV cache holds {num_tokens} tokens; "
            "lower it, or raise kv_cache_memory"
        )
    logger.info("max_model_len is reduced to %d, the tokens that the KV cache holds", num_tokens)
    return num_tokens
