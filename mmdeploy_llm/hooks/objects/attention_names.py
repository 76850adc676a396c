"""Finds attention backends by their names; imports no torch."""

from __future__ import annotations

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.hooks.names import did_you_mean, normalise
from mmdeploy_llm.hooks.objects.attention import AttentionBackendSpec


def named_backend(plugins: PluginManager, name: str) -> AttentionBackendSpec:
    """Returns the backend of this name or alias. Raises ConfigError when there is none, which names
    the others, and PluginConflictError on a tie."""
    specs = plugins.provided(AttentionBackendSpec)
    known = [each for spec in specs for each in (spec.name, *spec.aliases)]
    if normalise(name) not in map(normalise, known):
        owners = dict.fromkeys(map(plugins.owner, specs))
        listed = "; ".join(
            f"{', '.join(spec.name for spec in specs if plugins.owner(spec) == owner)} of plugin "
            f"{owner!r}"
            for owner in owners
        )
        raise ConfigError(
            f"attention_backend = {name!r} is not known{did_you_mean(name, known)}; use auto, or "
            f"{listed or 'a plugin that provides one'}{plugins.failure_note()}"
        )
    return plugins.named(AttentionBackendSpec, "attention backend", name)
