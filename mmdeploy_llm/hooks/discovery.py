"""Finds installed plugins through their entry points, without importing any of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmdeploy_llm.errors import ConfigError, PluginLoadError
from mmdeploy_llm.hooks.versions import OUR_DISTRIBUTION, requirement_problems

from .names import did_you_mean, error_text, listing, normalise
from .records import PluginFailure, PluginOrigin, failure_of

if TYPE_CHECKING:
    from importlib import metadata

ENTRY_POINT_GROUP = "mmdeploy_llm"
# Built-in plugins that are loaded also where others are named, as they are in every engine: what
# computes attention, what reads checkpoints, and what reads the outputs of runs.
CORE = ("attention", "outputs", "quantized")
NAME_TAKEN = "its entry point needs another name"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """An entry point that is not imported yet. requires: the Requires-Dist lines of its package."""

    origin: PluginOrigin
    entry_point: metadata.EntryPoint
    requires: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """How its package and the installed version of ours do not fit each other."""
        # In-tree: parsing our own requirements for each plugin would take milliseconds.
        return () if self.origin.is_builtin else requirement_problems(self.requires)

    @property
    def is_core(self) -> bool:
        """Whether it is loaded also where others are named."""
        return self.origin.is_builtin and self.entry_point.name in CORE

    @property
    def full_name(self) -> str:
        """The name with the package's, which means this plugin and no other."""
        return f"{package_form(self.origin.distribution or '')}:{self.entry_point.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """All installed plugins, sorted by name, each name once, and the failures of those left out."""

    plugins: tuple[InstalledPlugin, ...]
    failures: tuple[PluginFailure, ...] = field(default=())


def discover() -> Discovery:
    """Finds the installed plugins. A package with unreadable metadata becomes a failure and
    hides no other package."""
    from importlib import metadata  # not at the top: worker processes import this and find nothing

    found: dict[str, tuple[InstalledPlugin, ...]] = {}  # by package; the first on sys.path wins
    failures: list[PluginFailure] = []
    for distribution in metadata.distributions():
        try:
            plugins = _plugins_of(distribution)
        except Exception as error:
            failures.append(_unreadable(distribution, error))
            continue
        if plugins:
            found.setdefault(package_form(plugins[0].origin.distribution or ""), plugins)
    unique, clashes = _one_of_each_name(plugin for plugins in found.values() for plugin in plugins)
    return Discovery(plugins=unique, failures=(*failures, *clashes))


def _plugins_of(owner: metadata.Distribution) -> tuple[InstalledPlugin, ...]:
    """Returns the plugins of one package; reads nothing else if there are no entry points of our
    group. Those that name one module are names of one plugin."""
    entry_points = owner.entry_points.select(group=ENTRY_POINT_GROUP)
    if not entry_points:
        return ()
    package, version, requires = owner.name, owner.version, tuple(owner.requires or ())
    if not package:
        raise PluginLoadError("the package has entry points, but no name; install it again")
    is_ours = package_form(package) == OUR_DISTRIBUTION
    by_module: dict[str, list[metadata.EntryPoint]] = {}
    for item in sorted(entry_points, key=lambda item: item.name):
        by_module.setdefault(item.value, []).append(item)
    return tuple(
        InstalledPlugin(
            origin=PluginOrigin(
                name=first.name,
                module=first.value,
                distribution=package,
                version=version,
                is_builtin=is_ours,
                aliases=tuple(item.name for item in others),
            ),
            entry_point=first,
            requires=requires,
        )
        for first, *others in by_module.values()
    )


def _unreadable(distribution: metadata.Distribution, error: Exception) -> PluginFailure:
    try:
        name = distribution.name or ""
    except Exception:
        name = ""  # without METADATA the folder is the best name
    name = name or f"a package in {distribution.locate_file('')}"
    return PluginFailure(plugin=name, phase="discover", error=error_text(error), distribution=name)


def _one_of_each_name(
    found: Iterable[InstalledPlugin],
) -> tuple[tuple[InstalledPlugin, ...], list[PluginFailure]]:
    """Gives every plugin a name of its own: of several packages the one whose name sorts first
    keeps it, so the same on every machine, and the others are failures. A built-in plugin whose
    name somebody's package has too is known with its package's: an upgrade takes no name."""

    def order(plugin: InstalledPlugin) -> tuple[str, bool, str]:
        package = package_form(plugin.origin.distribution or "")
        return normalise(plugin.origin.name), plugin.origin.is_builtin, package

    kept: dict[str, InstalledPlugin] = {}
    failures = []
    for plugin in sorted(found, key=order):
        first = kept.setdefault(normalise(plugin.origin.name), plugin)
        if first is plugin:
            continue
        if plugin.origin.is_builtin and not first.origin.is_builtin:
            name = f"{OUR_DISTRIBUTION}:{plugin.origin.name}"
            kept[normalise(name)] = replace(plugin, origin=replace(plugin.origin, name=name))
            continue
        taken = f"its name is taken by {first.origin}; {NAME_TAKEN}"
        failures.append(failure_of(plugin.origin, "discover", taken))
    return tuple(kept.values()), failures


def package_form(name: str) -> str:
    """Returns the form in which names of packages are compared: "Acme.LLM" becomes "acme-llm"."""
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def select(
    installed: Sequence[InstalledPlugin],
    plugins: Sequence[str] | None,
    blocked: Sequence[str],
    *,
    core: bool = False,
) -> tuple[InstalledPlugin, ...]:
    """Returns the plugins to load: all (None) or exactly the named ones, and with `core` those
    of CORE, without the blocked ones.

    Names are compared normalised. Raises PluginLoadError for a named plugin that is not installed
    and ConfigError for one that is also blocked; warns about an unknown blocked name.
    """
    known = [plugin.origin.name for plugin in installed]
    out: set[str] = set()
    for name in blocked:
        meant = _meant(installed, name)
        out.update(plugin.origin.name for plugin in meant)
        if not meant:
            logger.warning(
                "blocked_plugins: no installed plugin is named %r%s (installed: %s)",
                name,
                did_you_mean(name, known),
                listing(known),
            )
    if plugins is None:
        return tuple(plugin for plugin in installed if plugin.origin.name not in out)
    wanted = {plugin.origin.name for plugin in installed if core and plugin.is_core} - out
    for name in plugins:
        meant = _meant(installed, name)
        if not meant:
            raise PluginLoadError(
                f"no installed plugin is named {name!r}{did_you_mean(name, known)}; installed: "
                f"{listing(known)}. Install the package that brings it, or correct `plugins`"
            )
        left = [plugin.origin.name for plugin in meant if plugin.origin.name not in out]
        if not left:
            raise ConfigError(
                f"plugin {name!r} is in plugins and in blocked_plugins; remove it from one of them"
            )
        wanted.update(left)
    return tuple(plugin for plugin in installed if plugin.origin.name in wanted)


def _meant(installed: Sequence[InstalledPlugin], name: str) -> list[InstalledPlugin]:
    """Returns the plugins that a name means: one, or a package's and the built-in one of the same
    name; "package:name" means one of them."""
    return [plugin for plugin in installed if normalise(name) in plugin.origin.names]


def files_of(
    files: Sequence[str | Path],
    blocked: Sequence[str],
    installed: Sequence[InstalledPlugin] = (),
) -> tuple[PluginOrigin, ...]:
    """Returns the plugins that single files are, each called as its file, with as many folders as
    tell it from the others. A name without ".py" means an installed plugin that has it, else the
    file. Raises ConfigError for one that is blocked, too."""
    paths = list(dict.fromkeys(Path(file).expanduser().absolute() for file in files))
    taken = {name for plugin in installed for name in plugin.origin.names}
    out = set(map(normalise, blocked)) - taken
    found = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        tails = (path.parts[-count:] for count in range(1, len(path.parts)))
        tail = next(tail for tail in tails if all(o[-len(tail) :] != tail for o in others))
        stem = normalise(path.stem)
        is_alone = [normalise(other.stem) for other in paths].count(stem) == 1
        origin = PluginOrigin(
            name="/".join(tail),
            module=str(path),
            file=path,
            aliases=(path.stem,) if is_alone and stem not in taken else (),
        )
        if out.intersection((*origin.names, stem)):
            raise ConfigError(f"the plugin file {str(path)!r} is in blocked_plugins; leave one out")
        found.append(origin)
    return tuple(found)
