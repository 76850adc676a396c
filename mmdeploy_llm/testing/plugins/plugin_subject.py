"""PluginSubject: a plugin as the checks see it, loaded here and in a fresh process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from mmdeploy_llm.errors import PluginError
from mmdeploy_llm.hooks import (
    PluginInfo,
    PluginManager,
)
from mmdeploy_llm.hooks.discovery import CORE
from mmdeploy_llm.hooks.files import load_file
from mmdeploy_llm.hooks.names import normalise
from mmdeploy_llm.hooks.records import Spec
from mmdeploy_llm.hooks.registry import MAX_IMPORT_SECONDS
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped, attributed
from mmdeploy_llm.values.options.plugin_choice import is_path

from .installed import installed
from .probe import probed


@dataclass(kw_only=True)
class PluginSubject:
    """A plugin to check. name: of its entry point, or of its module if it is not installed. file:
    of a plugin that is a single file. beside: files of other plugins."""

    name: str
    module_name: str
    module: ModuleType | None = None
    file: Path | None = None
    beside: Sequence[Path] = ()
    max_import_seconds: float = MAX_IMPORT_SECONDS
    _reported: set[str] = field(default_factory=set, init=False)  # failures seen by _report_once

    @classmethod
    def of(
        cls,
        plugin: ModuleType | str,
        *,
        max_import_seconds: float = MAX_IMPORT_SECONDS,
        beside: Sequence[Path] = (),
    ) -> PluginSubject:
        """Returns the subject for a module, its name, the name of an installed plugin, or the path
        of a file. beside: see the class."""
        file: Path | None = None
        module: ModuleType | None = None
        if isinstance(plugin, str) and is_path(plugin):
            file = Path(plugin).expanduser().absolute()
            name = module_name = file.name
        elif isinstance(plugin, ModuleType):
            name = module_name = plugin.__name__
            module = plugin
        else:
            found = installed(plugin)
            name, module_name = plugin, plugin if found is None else found.origin.module
        return cls(
            name=name,
            module_name=module_name,
            module=module,
            file=file,
            beside=beside,
            max_import_seconds=max_import_seconds,
        )

    @property
    def is_loose(self) -> bool:
        """Whether no installed package has the plugin."""
        return self.module is not None or self.file is not None

    @cached_property
    def loaded(self) -> ModuleType:
        """The imported module. Raises CheckFailed when the import fails."""
        if self.module is not None:
            return self.module
        with attributed(
            f"importing {self.module_name!r}",
            "correct the module, or the entry point that names it in pyproject.toml",
        ):
            if self.file is not None:
                return load_file(self.file)
            return importlib.import_module(self.module_name)

    @contextmanager
    def _report_once(self, what: str) -> Iterator[None]:
        """Lets a failure inside the block fail only the first check; later ones are skipped."""
        if what in self._reported:
            raise CheckSkipped(f"{what}, as an earlier check has reported")
        try:
            yield
        except CheckFailed:
            self._reported.add(what)
            raise

    @cached_property
    def manager(self) -> PluginManager:
        """A PluginManager with this plugin only."""
        with self._report_once("the plugin does not load"):
            module = self.loaded
            try:
                if self.file is not None:
                    return PluginManager.load(plugins=(), files=(self.file,))
                if self.module is None and (found := installed(self.name)) is not None:
                    return PluginManager.load(plugins=(found.full_name,))
                manager = PluginManager()
                manager.register(module, self.name)
                return manager
            except PluginError as error:
                raise CheckFailed(
                    f"{error}; the guide's page on plugins describes hooks and what they return"
                ) from error

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All specs that the plugin provides."""
        manager, own = self.manager, self._info.name
        return tuple(spec for spec in manager.specs if manager.owner(spec) == own)

    def has_hook(self, hook: str) -> bool:
        """Returns whether the plugin implements `hook`, one that provides no specs."""
        return f"hook {hook}" in self._info.provides

    @property
    def _info(self) -> PluginInfo:
        """The plugin among those that are loaded: the core's are always."""
        loaded, own = self.manager.plugins, normalise(self.name)
        return next(each for each in loaded if normalise(each.name) == own or each.name not in CORE)

    @cached_property
    def probe(self) -> Mapping[str, Any]:
        """The findings of a fresh process, see `probed`."""
        if self.module is not None and getattr(self.module, "__spec__", None) is None:
            raise CheckSkipped(f"{self.module_name} is not a file that another process can import")
        with self._report_once("a fresh process cannot list what the plugin provides"):
            return probed(self.module_name, None if self.file is None else str(self.file))
