"""Makes the table of the adapters that requests may name, and the model's blueprint that it and the
runners use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mmdeploy_llm.layers.adapters.attached.attach import Blueprint
from mmdeploy_llm.layers.adapters.attached.table import AdapterTable
from mmdeploy_llm.system.sharding import FirstRank, Ranks
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.weights.bounds import bounded_building

from .loaded import new_model, shard
from .model_files import ModelFiles


def new_table(files: ModelFiles, runtime: RuntimeConfig) -> AdapterTable:
    """Returns a table with the adapters of the options. Raises ConfigError and CheckpointError."""
    config = runtime.options
    size = config.tensor_parallel_size
    ranks = FirstRank(size) if size > 1 else None
    table = AdapterTable(
        partial(blueprint_of, files, runtime, ranks),
        max_rank=config.max_adapter_rank,
        max_bytes=config.adapter_memory,
        is_deterministic=config.deterministic,
    )
    for name, source in config.adapters.items():
        table.load(name, source)
    return table


def blueprint_of(files: ModelFiles, runtime: RuntimeConfig, ranks: Ranks | None) -> Blueprint:
    """Returns the blueprint of a model that one process holds, or one of several ranks."""

    def build() -> Any:
        with torch.device("meta"), bounded_building():
            return new_model(files, files.checkpoint.config)

    shares = {} if ranks is None else shard(files, ranks)(build())
    return Blueprint(build(), shares, getattr(torch, runtime.dtype))
