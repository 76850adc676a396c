"""Decides whether a model gets its draft head, and says clearly where it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import Checkpoint, ModelSpec, PluginManager
from mmdeploy_llm.hooks.factories import imported_for
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.find import find_weights
from mmdeploy_llm.weights.load import on_meta

AddDraftHead = Callable[[Any, Any], None]
ELSE = 'use speculative="ngram", or leave it out'


def draft_head_of(
    config: EngineConfig, plugins: PluginManager, spec: ModelSpec, checkpoint: Checkpoint
) -> AddDraftHead | None:
    """Returns what adds the draft head of a model; None where the options ask for none. Raises
    ConfigError where the family, or the checkpoint, has none."""
    if config.speculative != "mtp":
        return None
    if spec.draft_head is None:
        known = sorted(
            name for one in plugins.models if one.draft_head for name in one.architectures
        )
        raise ConfigError(
            f"speculative='mtp', but no draft layer of {checkpoint.architecture} is known, only of "
            f"{', '.join(known)}: {ELSE}"
        )
    if checkpoint.other_files:
        raise ConfigError(f"speculative='mtp' reads safetensors files only: {ELSE}")
    about = f"{plugins.origin(spec)}: {spec.draft_head}, the draft head of model {spec.name},"
    add: AddDraftHead = imported_for(spec.draft_head, about)
    if config.load_format != "dummy":
        _check_tensors(plugins, spec, checkpoint, add)
    return add


def _check_tensors(
    plugins: PluginManager, spec: ModelSpec, checkpoint: Checkpoint, add: AddDraftHead
) -> None:
    """Raises ConfigError where the files have no tensor of the draft head."""

    def build(config: Any) -> Any:
        built = plugins.build(spec, config)
        add(built, config)
        return built

    model: Any = on_meta(build, checkpoint)
    for path in find_weights(checkpoint.folder):
        with SafetensorsFile(path) as file:
            if any(_is_of_head(model, key) for key in file.entries):
                return
    raise ConfigError(
        f"speculative='mtp', but the files of this {checkpoint.architecture} have no tensors of "
        f"draft layers (multi-token prediction), which its publisher may have left out: {ELSE}"
    )


def _is_of_head(model: Any, key: str) -> bool:
    targets = model.weight_targets(key) or ()
    return any(target.name.startswith("draft_head.") for target in targets)
