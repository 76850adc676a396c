"""Finds the plugin to be checked; imports no torch, so that a wrong name is told at once."""

from __future__ import annotations

from pathlib import Path

from mmdeploy_llm.errors import PluginLoadError
from mmdeploy_llm.hooks.discovery import InstalledPlugin, discover
from mmdeploy_llm.hooks.files import check_file
from mmdeploy_llm.hooks.names import did_you_mean, listing, normalise
from mmdeploy_llm.values.options.plugin_choice import is_path


def installed(name: str) -> InstalledPlugin | None:
    """Returns the installed plugin of this name, or None; of a package's and a built-in one of the
    same name the package's."""
    found = [plugin for plugin in discover().plugins if normalise(name) in plugin.origin.names]
    return min(found, key=lambda plugin: plugin.origin.is_builtin, default=None)


def check_name(name: str) -> None:
    """Raises PluginLoadError where no plugin of this name is installed, and for the path of a file
    that cannot be read."""
    if is_path(name):
        check_file(Path(name).expanduser().absolute())
    elif installed(name) is None:
        known = [plugin.origin.name for plugin in discover().plugins]
        raise PluginLoadError(
            f"no installed plugin is named {name!r}{did_you_mean(name, known)}; installed: "
            f"{listing(known)}"
        )
