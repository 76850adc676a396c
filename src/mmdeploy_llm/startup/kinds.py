"""Says which kinds of media are known with an engine's plugins, and which of them a model takes."""

from __future__ import annotations

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.hooks import KindTable, PluginManager


def known_kinds(config: EngineConfig) -> KindTable:
    """Returns the kinds of the plugins of an engine. Raises PluginError for plugins that are named
    and missing."""
    return PluginManager.of(config).kinds


def accepted_kinds(config: EngineConfig) -> tuple[str, ...]:
    """Returns the kinds that the model takes, without its weights. Raises what `read_model_files`
    raises."""
    from mmdeploy_llm.model_folder import PROMPT_FILES, look_up, naming

    look_up(config, PROMPT_FILES)
    from .media import build_media  # which imports torch
    from .model_files import read_model_files

    files = read_model_files(config, PROMPT_FILES)
    with naming(config.model):
        media = build_media(files, config)
    media.close()
    return media.read
