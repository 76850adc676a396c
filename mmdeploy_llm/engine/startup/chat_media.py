"""ChatMedia: the media of conversations, as the intake of an engine takes them out of messages."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.engine.intake.chat import read_messages, with_sources
from mmdeploy_llm.media.loading.expanding import PartExpander
from mmdeploy_llm.media.loading.kinds import ModelMedia
from mmdeploy_llm.media.loading.reader import media_limits
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.weights.folder import PROMPT_FILES

from .media import build_media
from .model_files import ModelFiles, read_model_files


class ChatMedia:
    """Takes media out of messages, parts of plugins' types too. To be closed."""

    def __init__(self, config: EngineConfig) -> None:
        files = read_model_files(config, PROMPT_FILES)
        self._kinds = build_media(files, config)
        self._expander = expander_of(files, self._kinds, config)

    def of(self, messages: Any) -> dict[str, list[Any]]:
        """Returns the items by kind, in order, as `multimodal_data` has them. Raises
        RequestError."""
        kinds, expander = self._kinds, self._expander
        read = read_messages(messages, markers=(), template="", kinds=kinds, expander=expander)
        found: dict[str, list[Any]] = {}
        for item in with_sources(read, ()):
            value = {item.kind: item.source, **item.options} if item.options else item.source
            found.setdefault(item.kind, []).append(value)
        return found

    def close(self) -> None:
        """Closes what reads media."""
        self._kinds.close()


def expander_of(files: ModelFiles, media: ModelMedia, config: EngineConfig) -> PartExpander:
    """Returns what writes the parts of messages whose types plugins add, for a model."""
    return PartExpander(
        files.plugins.kinds,
        model=files.spec.name,
        takes=media.read,
        fetch=files.plugins.fetch_media,
        limits=media_limits(config),
        guard=files.plugins.guard,
    )
