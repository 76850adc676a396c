"""Counts the memory that a model will take before its weights are read. Sizes are in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.bounds import bounded_building
from mmdeploy_llm.weights.folder import naming

from .machine import read_machine
from .model_files import read_model_files
from .options import final_options
from .sizes import (
    count_blocks,
    count_state_rows,
    count_window_blocks,
    cpu_cache_memory,
    kv_cache_shape,
    weight_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory of a model, of all its engines together.

    device: where it is taken. num_threads: compute threads of an engine. kv_cache: with the states
        of layers that keep one.
    """

    device: str
    num_threads: int
    weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        """Weights and KV cache."""
        return self.weights + self.kv_cache


def count_needs(config: EngineConfig, free: int) -> MemoryNeeds:
    """Reads the model folder, but no weights, and returns what an engine with these options takes.
    A KV cache whose size the options leave open gets its usual share of what the weights leave of
    `free`. Raises ConfigError, ModelError, PluginError."""
    with naming(config.model):
        files = read_model_files(config)
        runtime = final_options(config, files, read_machine(config))
        with torch.device("meta"), bounded_building():
            model: Any = files.plugins.build(files.spec, files.checkpoint.config)
    count = config.data_parallel_size
    is_module = isinstance(model, nn.Module)
    weights = weight_bytes(model, getattr(torch, runtime.dtype)) if is_module else 0
    shape = kv_cache_shape(model, runtime)
    memory = runtime.kv_cache_memory_bytes
    if memory is None:
        memory = cpu_cache_memory(free - count * weights) // count
    num_state_rows = count_state_rows(shape, memory, runtime)
    states = num_state_rows * shape.bytes_per_state
    num_window_blocks = count_window_blocks(shape, memory - states, runtime)
    states += num_window_blocks * shape.bytes_per_window_block
    num_blocks = runtime.num_blocks_override
    if num_blocks is None:
        longest = -(-runtime.max_model_len // runtime.block_size)
        num_blocks = count_blocks(shape, memory - states, runtime.max_num_seqs * longest)
    return MemoryNeeds(
        device=runtime.device,
        num_threads=runtime.num_threads,
        weights=count * weights,
        kv_cache=count * (num_blocks * shape.bytes_per_block + states),
    )
