"""What the KV cache of a card may take: whether the weights fit at all, and what the largest steps
leave of the rest."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, Model
from mmdeploy_llm.hooks.contracts import media_size
from mmdeploy_llm.runtime_config import MEDIA_LIMIT_DEFAULT, RuntimeConfig

from .devices import check_memory
from .encoder_cache import values_per_call
from .kv_cache import KVCacheShape
from .peers import Peers
from .trial import LargestStep, Meter, cache_memory, measure

if TYPE_CHECKING:
    from .runner import Runner

logger = logging.getLogger(__name__)

LEAST_MEDIA = 1024  # tokens of a media item, for which there is always memory


def checked_size(model: Any, runtime: RuntimeConfig, num_ranks: int = 1) -> Any:
    """`model`, built on the meta device, when its weights and the least KV cache fit into the
    runtime's card; ConfigError with the numbers when they do not. num_ranks: cards that share it.
    On a CPU nothing is checked."""
    device = torch.device(runtime.device)
    if device.type != "cuda" or not isinstance(model, nn.Module):
        return model
    free, total = torch.cuda.mem_get_info(device)
    check_memory(
        device=runtime.device,
        weights=weight_bytes(model, getattr(torch, runtime.dtype)) // num_ranks,
        least_cache=2 * kv_cache_shape(model, runtime).bytes_per_block // num_ranks,
        free=free,
        total=total,
        utilization=runtime.gpu_memory_utilization,
    )
    return model


def weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Of all parameters once they are loaded in `dtype`, those that stay float32 in that."""
    num_bytes = 0
    for module in model.modules():
        keep = getattr(module, "fp32_parameters", ())
        for name, param in module.named_parameters(recurse=False):
            num_bytes += param.numel() * (4 if name in keep else dtype.itemsize)
    return num_bytes


def kv_cache_shape(model: Any, runtime: RuntimeConfig) -> KVCacheShape:
    """A block of the model's KV cache."""
    return KVCacheShape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=runtime.block_size,
        dtype=getattr(torch, runtime.kv_cache_dtype),
    )


def measured_memory(
    new_runner: Callable[[int], Runner],
    processors: Mapping[str, MediaProcessor],
    runtime: RuntimeConfig,
    model: Model,
    meter: Meter,
    peers: Peers,
) -> int:
    """Bytes for the KV cache: steps as large as any that may come are run and measured. new_runner:
    makes a runner with so many KV cache blocks, for these steps only. processors: by kind, closed
    afterwards; where their largest items would take more than half, on any rank, smaller ones are
    measured.
    Raises ConfigError when nothing is left."""
    most_media = min(runtime.encoder_cache_tokens, runtime.max_model_len - 2)
    while True:
        largest = largest_step(processors, runtime, model, most_media)
        runner = new_runner(-(-largest.longest // largest.block_size))
        memory = measure(runner.run, largest, meter)
        del runner
        gc.collect()  # its KV cache counts as available
        available = meter.available()
        is_fine = peers.agree(2 * memory.step <= available)
        if not largest.media or most_media <= LEAST_MEDIA or is_fine:
            break
        most_media //= 4
        logger.warning(
            "the largest media would take %.2f of %.2f GiB; those of more than %d tokens may find "
            "no memory, and fail alone: bound their size (mm_processor_kwargs), or max_model_len",
            memory.step / 2**30,
            available / 2**30,
            most_media,
        )
    for processor in processors.values():
        processor.close()
    return cache_memory(memory, largest, available, not runtime.enforce_eager)


def largest_step(
    processors: Mapping[str, MediaProcessor],
    runtime: RuntimeConfig,
    model: Model,
    most_media: int,
) -> LargestStep:
    """The largest step that the limits allow. processors: kind -> processor. most_media: tokens of
    a media item."""
    media: list[MediaInput] = []
    for kind, processor in processors.items():
        item = None
        if runtime.limit_mm_per_prompt.get(kind, MEDIA_LIMIT_DEFAULT):
            item = processor.largest(most_media)
        if item is not None:
            media += _for_one_call(item, runtime)
    embed_bytes = media_size(model) * getattr(torch, runtime.dtype).itemsize
    return LargestStep(
        num_tokens=runtime.max_num_batched_tokens,
        num_seqs=runtime.max_num_seqs,
        max_model_len=runtime.max_model_len,
        block_size=runtime.block_size,
        media=tuple(media),
        kept_bytes=runtime.encoder_cache_tokens * embed_bytes if processors else 0,
    )


def _for_one_call(item: MediaInput, runtime: RuntimeConfig) -> list[MediaInput]:
    """As many of the item, under keys of their own, as one call of the encoder may have."""
    num_values = sum(tensor.numel() for tensor in item.tensors.values())
    by_values = values_per_call(torch.device(runtime.device)) // max(1, num_values)
    by_tokens = runtime.max_num_batched_tokens // item.num_tokens
    count = max(1, min(by_values, by_tokens))
    return [replace(item, key=f"trial-{number}-{item.key}") for number in range(count)]


def fitted(config: EngineConfig, runtime: RuntimeConfig, num_blocks: int) -> RuntimeConfig:
    """A context the KV cache can hold: cut where we chose it, an error where it was asked for."""
    num_tokens = num_blocks * runtime.block_size
    if runtime.max_model_len <= num_tokens:
        return runtime
    if config.max_model_len is not None and config.num_gpu_blocks_override is None:
        raise ConfigError(
            f"max_model_len = {config.max_model_len}, but the KV cache holds {num_tokens} tokens; "
            "lower it, or raise kv_cache_memory"
        )
    logger.info("max_model_len is %d, what the KV cache holds", num_tokens)
    return replace(runtime, max_model_len=num_tokens)


def log_cache(num_blocks: int, shape: KVCacheShape) -> None:
    """The line that tells how large the KV cache is."""
    logger.info(
        "total_block_num:%d, block size %d, %d cacheable tokens, %.1f MiB",
        num_blocks,
        shape.block_size,
        num_blocks * shape.block_size,
        num_blocks * shape.bytes_per_block / 2**20,
    )
