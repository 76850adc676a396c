"""Saves the model of an engine: the weights that it computes with, from the files it was loaded
from. Its kernels keep weights in layouts of their own, perhaps in other processes; rounding the
files again in the same way has the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from mmdeploy_llm.engine.startup.machine import load_kernels
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint, PluginManager
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.options.weight_formats import FORMATS, QuantizationName, names_of
from mmdeploy_llm.weights.bounds import bounded_building
from mmdeploy_llm.weights.find import INDEX_FILE, find_weights
from mmdeploy_llm.weights.folder import MODEL_FILES, read_checkpoint, resolve_model
from mmdeploy_llm.weights.stored_head import follow_stored_head, untie

from .folders import check_output, copy_others, digest_of, written
from .rounders import KernelRounder
from .writer import Writer


def save_loaded(
    config: EngineConfig, runtime: RuntimeConfig, output: Path, *, overwrite: bool
) -> None:
    """Writes the model that the options load to the folder `output`; see LLM.save."""
    if config.load_format == "dummy":
        raise ConfigError("load_format = 'dummy' reads no weights: there are none to save")
    place = resolve_model(config.model, config.revision, MODEL_FILES)
    checkpoint = follow_stored_head(read_checkpoint(place))
    if checkpoint.other_files and config.load_format != "safetensors":
        raise ConfigError(
            f"{config.model} is {checkpoint.other_files[0].name}, which is not saved in another "
            "format; copy the file"
        )
    check_output(output, checkpoint.folder, overwrite=overwrite)
    paths = find_weights(checkpoint.folder)
    quantization = config.quantization
    values = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    is_plain = quantization is None or is_quantized(values)
    if quantization and not is_plain and FORMATS[quantization].transformers is None:
        saved = names_of(row for row in FORMATS.values() if row.transformers)
        raise ConfigError(
            f"quantization = {quantization!r} rounds weights to codes of a layout of its own, "
            f"which is not saved; load the model with {saved}"
        )
    options = {
        "save": None if is_plain else quantization,
        "group_size": config.quantization_group_size,
        "dtype": runtime.dtype,
    }
    with written(output, digest_of(options, paths), overwrite=overwrite) as partial:
        if is_plain or quantization is None:
            for path in paths:
                shutil.copyfile(path, partial.folder / path.name)
            if (checkpoint.folder / INDEX_FILE).exists():
                shutil.copyfile(checkpoint.folder / INDEX_FILE, partial.folder / INDEX_FILE)
        else:
            rounder = _rounder(config, quantization, runtime)
            writer = Writer(partial, built(config, checkpoint), rounder)
            writer.copy(paths)
            writer.finish(untie(values, checkpoint))
        copy_others(checkpoint.folder, partial.folder)


def is_quantized(config: dict[str, Any]) -> bool:
    """Whether a config.json says that its weights are quantised."""
    parts = (config, config.get("text_config") or {})
    return any("quantization_config" in part or "compression_config" in part for part in parts)


def built(config: EngineConfig, checkpoint: Checkpoint) -> Any:
    """Returns the model of a checkpoint on the meta device."""
    manager = PluginManager.of(config)
    spec = manager.model_for(checkpoint.config.architectures or (), checkpoint.config)
    with torch.device("meta"), bounded_building():
        return manager.build(spec, checkpoint.config)


def _rounder(
    config: EngineConfig, quantization: QuantizationName, runtime: RuntimeConfig
) -> KernelRounder:
    kernels: Any = load_kernels(config, is_cpu=True)  # raises where the engine could not round
    return KernelRounder(kernels, quantization, getattr(torch, runtime.dtype))
