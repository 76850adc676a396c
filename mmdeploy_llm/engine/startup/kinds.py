"""Says which kinds of media are known with an engine's plugins, which of them a model takes, and
what it is asked about them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks import KindTable, PluginManager
from mmdeploy_llm.values.options.config import EngineConfig


def known_kinds(config: EngineConfig) -> KindTable:
    """Returns the kinds of the plugins of an engine. Raises PluginError for plugins that are named
    and missing."""
    return PluginManager.of(config).kinds


def accepted_kinds(config: EngineConfig) -> tuple[str, ...]:
    """Returns the kinds that the model takes, without its weights. Raises what `read_model_files`
    raises."""
    from mmdeploy_llm.weights.folder import PROMPT_FILES, look_up, naming

    look_up(config, PROMPT_FILES)
    from .media import build_media  # which imports torch
    from .model_files import read_model_files

    files = read_model_files(config, PROMPT_FILES)
    with naming(config.model):
        media = build_media(files, config)
    media.close()
    return media.read


def usual_question(config: EngineConfig) -> Callable[[], str | None]:
    """Returns a function that returns ModelSpec.question of the model's family. It reads
    config.json when it is first called; what is wrong with a model is told when it is loaded."""
    return cache(lambda: _question(config))


def _question(config: EngineConfig) -> str | None:
    from mmdeploy_llm.weights.folder import PROMPT_FILES, read_json, resolve_model

    try:
        place = resolve_model(config.model, config.revision, PROMPT_FILES)
        folder = place if place.is_dir() else place.parent
        architectures = read_json(folder / "config.json").get("architectures")
        return PluginManager.of(config).model_for(architectures or ()).question
    except MMDeployLLMError:  # who asks loads the model next, and tells it then
        return None
