"""Says which kinds of media are known with an engine's plugins, which of them a model takes, and
what it is asked about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.hooks import KindTable, PluginManager


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenMedia:
    """The kinds of media that a model takes, and what it is asked about them, see ModelSpec."""

    kinds: tuple[str, ...]
    question: str | None


def known_kinds(config: EngineConfig) -> KindTable:
    """Returns the kinds of the plugins of an engine. Raises PluginError for plugins that are named
    and missing."""
    return PluginManager.of(config).kinds


def taken_media(config: EngineConfig) -> Callable[[], TakenMedia]:
    """Returns a function that says what the model takes, without its weights; it reads the model's
    folder when it is first called, and raises what `read_model_files` raises."""
    return cache(lambda: _taken(config))


def _taken(config: EngineConfig) -> TakenMedia:
    from mmdeploy_llm.model_folder import PROMPT_FILES, look_up, naming

    look_up(config, PROMPT_FILES)
    from .media import build_media  # which imports torch
    from .model_files import read_model_files

    files = read_model_files(config, PROMPT_FILES)
    with naming(config.model):
        media = build_media(files, config)
    media.close()
    return TakenMedia(kinds=media.read, question=files.spec.question)
