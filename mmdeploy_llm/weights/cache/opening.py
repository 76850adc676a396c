"""Opens the cache of weights for a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint, PluginManager
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.read_ahead import cache_folder, mark_of

from .cache import WeightCache
from .key import source_key

MIN_BYTES = 64 * 2**20  # of a model that is kept: smaller ones load as fast without


def open_cache(
    runtime: RuntimeConfig,
    checkpoint: Checkpoint,
    plugins: PluginManager,
    facts: Mapping[str, object],
    others: Iterable[Path] = (),
) -> WeightCache | None:
    """Returns the cache of a model on a CPU; None where the options switch it off, there is no home
    for it, and for weights that are random.

    facts: what the weights depend on beside files and options: the model's spec, the level of the
    kernels, the rank. others: files with weights beside those of the checkpoint.
    """
    options = runtime.options
    if not options.weight_cache or runtime.device != "cpu" or options.load_format == "dummy":
        return None
    asked = {
        "options": (options.load_format, options.deterministic, runtime.dtype),
        "rounding": (runtime.quantization, options.quantization_group_size),
        "gguf": checkpoint.gguf_tables,
    }
    try:
        place = cache_folder(options.weight_cache)
        files = [*_model_files(checkpoint), *others]
        key = f"{mark_of(options.model)}-{source_key(files, _code(plugins), {**facts, **asked})}"
    except (OSError, RuntimeError, CheckpointError):  # told by who reads the weights
        return None
    # In a folder of its own a small model is kept too: somebody asked for that.
    least = MIN_BYTES if options.weight_cache is True else 0
    if place is None:
        return None
    return WeightCache(
        place,
        key,
        options.weight_cache_size,
        least,
        num_ranks=options.tensor_parallel_size,
        num_engines=options.data_parallel_size,
    )


def _model_files(checkpoint: Checkpoint) -> Iterator[Path]:
    """Yields the files that the weights and their shapes come from."""
    yield from checkpoint.folder.glob("*.json")
    yield from checkpoint.other_files or find_weights(checkpoint.folder)
    if checkpoint.gguf_tower is not None:
        yield checkpoint.gguf_tower


def _code(plugins: PluginManager) -> Iterator[Path]:
    """Yields the folders of this package and of all plugins, which may read weights."""
    yield Path(__file__).parents[2]
    for origin in {plugins.origin(spec) for spec in plugins.specs}:
        module = sys.modules.get(origin.module.partition(".")[0])
        own = origin.file or getattr(module, "__file__", None)
        yield from map(Path, getattr(module, "__path__", [own] if own else []))
