"""Reads for which version of the plugin API the package of a test class was written."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mmdeploy_llm.hooks.discovery import discover
from mmdeploy_llm.hooks.versions import API_VERSION, written_for
from mmdeploy_llm.testing.models.base import newer_than

from .plugin_subject import PluginSubject

OURS = frozenset({"mmdeploy_llm", "mmdeploy_llm_plugins", "mmdeploy_llm_processors"})


def declared_by(tested: Any) -> tuple[int, int] | None:
    """Returns the version that the package declares of which a test class has the `plugin` or the
    `spec`; the present one for our own packages, None where no version is declared."""
    found = map(version_of, _modules_of(tested))
    return next((version for version in found if version is not None), None)


def version_of(module: Any) -> tuple[int, int] | None:
    """Returns the version that a plugin's module declares; the present one for our own, None for a
    declaration that is none, which another check reports."""
    if is_ours(module.__name__):
        return API_VERSION
    with suppress(TypeError, ValueError):
        return written_for(module)
    return None


def dated(verdict: Any, subject: PluginSubject) -> Any:
    """Returns a verdict of `plugins check`, which of a failed check that is newer than the plugin
    says so."""
    if verdict.outcome != "fail" or verdict.since is None:
        return verdict
    newer = newer_than(verdict.since, version_of(subject.loaded))
    return replace(verdict, message=f"{newer}: {verdict.message}") if newer else verdict


def is_ours(module: str) -> bool:
    """Whether a module is of this project."""
    return module.partition(".")[0] in OURS


def _modules_of(tested: Any) -> Iterator[Any]:
    """Yields the modules of the plugin that may declare a version, imported."""
    plugin, spec = getattr(tested, "plugin", None), getattr(tested, "spec", None)
    if plugin is not None:
        with suppress(Exception, SystemExit):  # the checks report an import that fails
            yield PluginSubject.of(plugin).loaded
    named = getattr(spec, "factory", None) or getattr(spec, "reader", None)
    if named is None:
        return
    module = named.partition(":")[0]
    top = module.partition(".")[0]
    installed = (each.origin.module for each in discover().plugins)
    beside = [each for each in installed if each.partition(".")[0] == top]
    for name in dict.fromkeys((top, *beside, module)):
        with suppress(Exception, SystemExit):
            yield sys.modules.get(name) or importlib.import_module(name)
