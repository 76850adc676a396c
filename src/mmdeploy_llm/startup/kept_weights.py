"""Opens the cache of weights for the model that is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.runtime_config import RuntimeConfig
from mmdeploy_llm.sharding import Ranks
from mmdeploy_llm.weight_cache import WeightCache, cache_folder, source_key
from mmdeploy_llm.weights.find import find_weights

from .machine import Machine
from .model_files import ModelFiles

MIN_BYTES = 64 * 2**20  # of a model that is kept: smaller ones load as fast without


def open_cache(
    runtime: RuntimeConfig, files: ModelFiles, machine: Machine, ranks: Ranks | None
) -> WeightCache | None:
    """Returns the cache; None where the options switch it off, there is no home for it, and for
    weights that are random, or not packed by the kernels for CPUs."""
    options = runtime.options
    is_packed = machine.cpu_level is not None and runtime.device == "cpu"
    if not options.weight_cache or not is_packed or options.load_format == "dummy":
        return None
    facts = {
        "model": (files.plugins.owner(files.spec), files.spec.name, files.spec.factory),
        "head": files.head,
        "gguf": files.checkpoint.gguf_tables,
        "options": (options.load_format, options.deterministic, runtime.dtype),
        "rounding": (options.quantization, options.quantization_group_size),
        "level": machine.cpu_level,
        "rank": None if ranks is None else (ranks.rank, ranks.size),
    }
    try:
        place = cache_folder(options.weight_cache)
        key = source_key(_model_files(files), _code(files.plugins), facts)
    except (OSError, RuntimeError, CheckpointError):  # told by who reads the weights
        return None
    # In a folder of its own a small model is kept too: somebody asked for that.
    least = MIN_BYTES if options.weight_cache is True else 0
    return None if place is None else WeightCache(place, key, options.weight_cache_size, least)


def _model_files(files: ModelFiles) -> Iterator[Path]:
    """Yields the files that the weights and their shapes come from."""
    found = files.checkpoint
    yield from found.folder.glob("*.json")
    yield from found.gguf_files or find_weights(found.folder)
    yield from (rule.weights for rule in files.rules.dense)
    if found.gguf_tower is not None:
        yield found.gguf_tower


def _code(plugins: PluginManager) -> Iterator[Path]:
    """Yields the folders of this package and of all plugins, which may read weights."""
    yield Path(__file__).parent.parent
    for origin in {plugins.origin(spec) for spec in plugins.specs}:
        module = sys.modules.get(origin.module.partition(".")[0])
        own = origin.file or getattr(module, "__file__", None)
        yield from map(Path, getattr(module, "__path__", [own] if own else []))
