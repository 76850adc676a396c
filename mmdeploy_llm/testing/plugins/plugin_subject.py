"""PluginSubject: a plugin as the checks see it, loaded here and in a fresh process."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
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
from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.testing.models.base import CheckFailed, CheckSkipped, attributed, demand
from mmdeploy_llm.values.options.plugin_choice import is_path

from .installed import installed

PROBE_TIMEOUT = 120.0
IMPORTTIME = "import time:"
HEAVY = ("torch", "transformers")

# Runs in a fresh process. argv[1]: sys.path, name of the module, its file if it is a single one,
# provide_ hooks; argv[2]: HEAVY.
PROBE = """
import json, sys, time
path, name, file, hooks = json.loads(sys.argv[1])
sys.path[:] = path
import mmdeploy_llm.hooks
importers = {}
class Finder:
    def find_spec(self, module, *_):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        importers.setdefault(module, f"{frame.f_code.co_filename}:{frame.f_lineno}")
sys.meta_path.insert(0, Finder())
import pathlib, mmdeploy_llm.hooks.files
print("BEGIN", file=sys.stderr, flush=True)
start = time.perf_counter()
if file is None:
    __import__(name)  # of which Python tells the time of each module
    module = sys.modules[name]
else:
    module = mmdeploy_llm.hooks.files.load_file(pathlib.Path(file))
seconds = time.perf_counter() - start
print("IMPORTED", flush=True)
for hook in hooks:
    list(getattr(module, hook, list)())
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
by = {name: importers.get(name, "") for name in heavy}
print("PROBE" + json.dumps({"seconds": seconds, "heavy": heavy, "by": by}))
"""


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
        """Findings of a fresh process: seconds of the import, and imported HEAVY modules."""
        if self.module is not None and getattr(self.module, "__spec__", None) is None:
            raise CheckSkipped(f"{self.module_name} is not a file that another process can import")
        with self._report_once("a fresh process cannot list what the plugin provides"):
            return self._probed()

    def _probed(self) -> Mapping[str, Any]:
        file = None if self.file is None else str(self.file)
        about = [sys.path, self.module_name, file, list(PROVIDED)]
        arguments = json.dumps(about), json.dumps(HEAVY)
        command = [sys.executable, "-X", "importtime", "-c", PROBE, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise CheckFailed(
                f"importing {self.module_name!r} and listing took over {PROBE_TIMEOUT:g} s; do no "
                "work at import, move it into the factory"
            ) from None
        _, mark, answer = done.stdout.rpartition("PROBE")
        told = done.stderr.partition("BEGIN")[2] or done.stderr
        lines = [line for line in told.splitlines() if not line.startswith(IMPORTTIME)]
        last = ([line for line in lines if line.strip()] or [f"exit status {done.returncode}"])[-1]
        is_imported = "IMPORTED" in done.stdout
        doing = "calling the provide_ hooks of" if is_imported else "importing"
        demand(
            mark and done.returncode == 0,
            f"{doing} {self.module_name!r} in a fresh process failed: {last}; a plugin must be "
            "importable on its own and list what it provides",
        )
        times = {"slowest": _slowest(done.stderr), "heavy_seconds": _heavy_seconds(done.stderr)}
        return {**json.loads(answer), **times}


def _slowest(told: str) -> str:
    """Returns the module that took longest by itself after BEGIN, from what Python tells."""
    timed = [(own, name.strip()) for own, _, name in _timed(told)]
    micros, name = max(timed, default=(0, "nothing"))
    return f"{name} ({micros / 1e6:.1f} s)"


def _heavy_seconds(told: str) -> float:
    """Returns the seconds after BEGIN in imports of torch, transformers and this package, and of
    what they import."""
    total, within = 0, -1
    for _, cumulative, name in reversed(_timed(told)):  # a module comes before its importers
        depth = len(name) - len(name.lstrip())
        if depth > within >= 0:
            continue
        is_heavy = name.strip().partition(".")[0] in (*HEAVY, "mmdeploy_llm")
        within = depth if is_heavy else -1
        total += cumulative if is_heavy else 0
    return total / 1e6


def _timed(told: str) -> list[tuple[int, int, str]]:
    """Returns (own, cumulative, indented name) of the modules imported after BEGIN, in
    microseconds."""
    found = []
    for line in told.partition("BEGIN")[2].splitlines():
        own, _, rest = line.removeprefix(IMPORTTIME).partition("|")
        cumulative, _, name = rest.partition("|")
        if line.startswith(IMPORTTIME) and own.strip().isdigit():
            found.append((int(own), int(cumulative), name))
    return found
