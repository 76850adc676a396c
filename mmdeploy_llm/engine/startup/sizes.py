"""Counts bytes before anything is allocated: weights, KV cache blocks and free memory. Sizes are in
bytes unless the name says tokens or blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmdeploy_llm.caches import layer_caches
from mmdeploy_llm.engine.schedule.windows import blocks_of_window
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape
from mmdeploy_llm.layers.pooling.abilities import has_whole_prompts, is_bidirectional
from mmdeploy_llm.system.portable.machine import free_ram
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.plan import NUM_FIXED
from mmdeploy_llm.weights.kept import CodedHolder
from mmdeploy_llm.weights.load import dtype_of

from .cards import check_memory

CPU_SHARE_OF_FREE_RAM = 0.4  # the rest is for activations, media and other programs
CPU_MAX_BYTES = 8 * 2**30
MAX_STATE_SHARE = 0.6  # of the memory for caches, for the states of running sequences
KEPT_STATE_SHARE = 0.1  # the same for states of prefixes that no sequence uses
MIN_KEPT_STATES, MAX_KEPT_STATES = 4, 1024
WINDOW_SHARE = 0.5  # of the memory for caches, for the layers with a window


def available_memory(device: torch.device, utilization: float) -> int:
    """Returns the bytes that the KV cache may take, once the weights are loaded: on a CPU a share
    of the free RAM, on CUDA what is left of the share `utilization` of the card."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - utilization) * total))
    return cpu_cache_memory(free_ram())


def cpu_cache_memory(free: int) -> int:
    """Returns the share of the free RAM that the KV cache takes on a CPU."""
    return min(CPU_MAX_BYTES, int(CPU_SHARE_OF_FREE_RAM * max(0, free)))


def count_blocks(shape: KVCacheShape, memory: int, max_blocks: int) -> int:
    """Returns how many blocks fit into `memory`, at most `max_blocks`, the number that all requests
    at full length would use: all of them where no layer keeps anything in them, since each has a
    window. Raises ConfigError when not even two fit."""
    most = max(2, max_blocks)
    fits = max(0, memory) // shape.bytes_per_block if shape.bytes_per_block else most
    num_blocks = min(fits, most)
    if num_blocks < 2:
        raise ConfigError(
            f"{memory / 2**20:.1f} MiB for the KV cache hold {num_blocks} blocks of "
            f"{shape.block_size} tokens ({shape.bytes_per_block / 2**20:.2f} MiB each); at least "
            "2 are needed: raise kv_cache_memory, or free memory"
        )
    return num_blocks


def count_state_rows(shape: KVCacheShape, memory: int, runtime: RuntimeConfig) -> int:
    """Returns how many rows of states to allocate, fixed ones included: two for each sequence that
    runs, and some to keep the states of prefixes. 0 for a model without states.

    Raises ConfigError when those that run take more than MAX_STATE_SHARE of `memory`.
    """
    each = shape.bytes_per_state
    if not each:
        return 0
    running = NUM_FIXED + 2 * runtime.max_num_seqs
    if running * each > MAX_STATE_SHARE * memory:
        # Two rows are one sequence, and the two fixed ones take the place of another.
        fits = int(MAX_STATE_SHARE * memory) // each // 2 - 1
        raise ConfigError(
            f"this model keeps {each / 2**20:.1f} MiB of state for each sequence, twice while it "
            f"runs: {runtime.max_num_seqs} sequences take {running * each / 2**30:.2f} GiB of the "
            f"{memory / 2**30:.2f} GiB for caches; lower max_num_seqs to {max(1, fits)} or less, "
            "or raise kv_cache_memory"
        )
    if not runtime.enable_prefix_caching:
        return running
    kept = runtime.prefix_cache_memory_bytes
    if kept is None:
        kept = int(KEPT_STATE_SHARE * memory)
    return running + max(MIN_KEPT_STATES, min(MAX_KEPT_STATES, kept // each))


def count_window_blocks(shape: KVCacheShape, memory: int | None, runtime: RuntimeConfig) -> int:
    """Returns how many blocks the layers with a window get: enough for the windows of all running
    sequences, for one step and for prefixes as long as one sequence; of `memory` at most
    WINDOW_SHARE, but always enough for one sequence. 0 for a model without such layers. memory:
    None where the options give num_blocks. Raises ConfigError when one sequence does not fit.
    """
    window = max(shape.windows.values(), default=None)
    if window is None:
        return 0
    size, seqs = runtime.block_size, runtime.max_num_seqs
    longest = -(-runtime.max_model_len // size)
    each, step = blocks_of_window(window, size), -(-runtime.max_num_batched_tokens // size)
    most = min(seqs * each + step, seqs * longest) + longest
    least = min(each + step, longest)
    if runtime.num_blocks_override is not None:
        return max(least, min(most, runtime.num_blocks_override))
    assert memory is not None, "one of both is known"
    needed = least * shape.bytes_per_window_block
    if needed > memory:
        raise ConfigError(
            f"the layers with a window of {window} tokens need {needed / 2**20:.1f} MiB for one "
            f"sequence, the KV cache has {memory / 2**20:.1f} MiB: raise kv_cache_memory, lower "
            "max_num_batched_tokens or max_model_len, or free memory"
        )
    share = WINDOW_SHARE if shape.bytes_per_block else 1
    return max(least, min(most, int(share * memory) // shape.bytes_per_window_block))


def check_size(
    model: Any, runtime: RuntimeConfig, num_ranks: int = 1, *, stays_coded: bool = False
) -> Any:
    """Returns `model`, which is on the meta device. Raises ConfigError with the numbers when its
    weights and the smallest KV cache are too large for the card; on a CPU nothing is checked.
    num_ranks: cards that share the model. stays_coded: whether its checkpoint is in few bits, of
    which 4 are the least."""
    device = torch.device(runtime.device)
    if device.type != "cuda" or not isinstance(model, nn.Module):
        return model
    torch.cuda.empty_cache()  # what a load that failed has left there
    free, total = torch.cuda.mem_get_info(device)
    shape, dtype = kv_cache_shape(model, runtime), getattr(torch, runtime.dtype)
    check_memory(
        device=runtime.device,
        weights=weight_bytes(model, dtype, bits=4 if stays_coded else None) // num_ranks,
        least_cache=2 * (shape.bytes_per_block + shape.bytes_per_window_block) // num_ranks,
        free=free,
        total=total,
        utilization=runtime.gpu_memory_utilization,
    )
    return model


def weight_bytes(model: nn.Module, dtype: torch.dtype, *, bits: int | None = None) -> int:
    """Returns the bytes of all parameters once they are loaded in `dtype`, or in float32 where a
    module keeps them so. bits: the least that a value takes where a module may hold it in few bits,
    as a checkpoint stores it or an option rounds it; None: none is in few bits."""
    num_bytes = 0
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if bits and isinstance(module, CodedHolder) and module.can_hold_coded(name):
                num_bytes += param.numel() * bits // 8
            else:
                num_bytes += param.numel() * dtype_of(module, name, dtype).itemsize
    return num_bytes


def kv_cache_shape(model: Any, runtime: RuntimeConfig) -> KVCacheShape:
    """Returns the shape of one block of the model's KV cache."""
    return KVCacheShape(
        layers=() if is_bidirectional(model) else layer_caches(model),
        block_size=runtime.block_size,
        dtype=getattr(torch, runtime.kv_cache_dtype),
        model_dtype=getattr(torch, runtime.dtype),
    )


def model_length(model: Any, runtime: RuntimeConfig) -> int:
    """Returns max_model_len, lowered to the tokens that the model may compute: its `max_positions`,
    and those of one step where prompts are never divided. Raises ConfigError when the user asked
    for more."""
    asked, length = runtime.options.max_model_len, runtime.max_model_len
    most = getattr(model, "max_positions", None)
    if most is not None and length > most:
        if asked is not None:
            raise ConfigError(
                f"max_model_len = {asked}, but {type(model).__name__} computes "
                f"sequences of at most {most} tokens; lower it"
            )
        length = int(most)
    if has_whole_prompts(model) and length > runtime.max_num_batched_tokens:
        if asked is not None:
            raise ConfigError(
                f"max_model_len = {asked}, but {type(model).__name__} computes a prompt in one "
                f"step of max_num_batched_tokens = {runtime.max_num_batched_tokens}; raise that"
            )
        length = runtime.max_num_batched_tokens
    return length
