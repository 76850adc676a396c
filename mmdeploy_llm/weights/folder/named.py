"""Looks for the plugins, and for what they provide, that the options of an engine name: a wrong
name is told before torch is imported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mmdeploy_llm.hooks import PluginManager, registry
from mmdeploy_llm.hooks.objects.attention_names import named_backend
from mmdeploy_llm.values.options.config import EngineConfig

OF_ITSELF = (None, "auto")


def check_named(config: EngineConfig) -> None:
    """Raises ConfigError and PluginError for a name that means nothing. Loads the plugins only
    where the options name some; the start, which loads them too, warns of what is wrong with
    others."""
    reasoning, tools = config.reasoning_parser, config.tool_call_parser
    backend, processors = config.attention_backend, config.logits_processors
    chosen = config.plugins or config.plugin_files or config.use or processors
    if not chosen and {reasoning, tools, backend} <= set(OF_ITSELF):
        return
    with _untold():
        plugins = PluginManager.of(config)
        if reasoning and reasoning not in OF_ITSELF:
            plugins.reasoning_parser(reasoning)
        if tools and tools not in OF_ITSELF:
            plugins.tool_parser(tools)
        for name in processors:
            plugins.logits_processor(name)
        if backend not in OF_ITSELF:
            named_backend(plugins, backend)


@contextmanager
def _untold() -> Iterator[None]:
    """Writes no warnings of this thread about plugins."""
    here = threading.get_ident()
    logger = logging.getLogger(registry.__name__)

    def is_of_another(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(is_of_another)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another)
