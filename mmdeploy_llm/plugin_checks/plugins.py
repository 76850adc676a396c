"""Checks of a plugin as a whole: its module, its hooks and the specs that it lists."""

from __future__ import annotations

import importlib
import inspect
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

from mmdeploy_llm.errors import MediaError, PluginError
from mmdeploy_llm.hooks import (
    PluginManager,
)
from mmdeploy_llm.hooks.discovery import NAME_TAKEN, InstalledPlugin, discover
from mmdeploy_llm.hooks.names import normalise
from mmdeploy_llm.hooks.records import PluginFailure, PluginOrigin, Spec, describe
from mmdeploy_llm.hooks.selection import use_keys
from mmdeploy_llm.hooks.validation import PROVIDED
from mmdeploy_llm.hooks.validation import _claims as claims
from mmdeploy_llm.model_checks.base import Check, CheckFailed, CheckSkipped, attributed, demand
from mmdeploy_llm.plugin_choice import is_path
from mmdeploy_llm.plugin_files import load_file

from .arguments import example_arguments

MAX_IMPORT_SECONDS = 3.0
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
import pathlib, mmdeploy_llm.plugin_files
print("BEGIN", file=sys.stderr, flush=True)
start = time.perf_counter()
if file is None:
    __import__(name)  # of which Python tells the time of each module
    module = sys.modules[name]
else:
    module = mmdeploy_llm.plugin_files.load_file(pathlib.Path(file))
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
                    f"{error}; hooks and what they return are described in plugins/README.md"
                ) from error

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All specs that the plugin provides."""
        return _specs(self.manager)

    def has_hook(self, hook: str) -> bool:
        """Returns whether the plugin implements `hook`, one that provides no specs."""
        return f"hook {hook}" in self.manager.plugins[0].provides

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
        return {**json.loads(answer), "slowest": _slowest(done.stderr)}


def _slowest(told: str) -> str:
    """Returns the module that took longest by itself after BEGIN, from what Python tells."""
    timed = []
    for line in told.partition("BEGIN")[2].splitlines():
        own, _, rest = line.removeprefix(IMPORTTIME).partition("|")
        if line.startswith(IMPORTTIME) and own.strip().isdigit():
            timed.append((int(own), rest.rpartition("|")[2].strip()))
    micros, name = max(timed, default=(0, "nothing"))
    return f"{name} ({micros / 1e6:.1f} s)"


def installed(name: str) -> InstalledPlugin | None:
    """Returns the installed plugin of this name, or None; of a package's and a built-in one of the
    same name the package's."""
    found = [plugin for plugin in discover().plugins if normalise(name) in plugin.origin.names]
    return min(found, key=lambda plugin: plugin.origin.is_builtin, default=None)


def imports_in_a_fresh_process(subject: PluginSubject) -> None:
    """The module can be imported and lists what it provides in a fresh process."""
    demand(subject.probe is not None, "unreachable")


def lists_without_torch(subject: PluginSubject) -> str | None:
    """Importing the module and listing what it provides imports neither torch nor transformers; a
    single file may, since it is loaded only where it is named."""
    heavy = subject.probe["by"]
    if subject.file is not None:
        return f"it imports {', '.join(heavy)}: fine in a file, not in a package" if heavy else None
    shown = ", ".join(f"{name} (at {where})" for name, where in heavy.items())
    demand(
        not heavy,
        f"importing {subject.module_name!r} and listing imports {shown}; move the code "
        'that needs it into another module, and name that in the spec\'s factory "module:Class"',
    )
    return None


def imports_quickly(subject: PluginSubject) -> None:
    """Importing the module does no work."""
    seconds, allowed = subject.probe["seconds"], subject.max_import_seconds
    demand(
        seconds <= allowed,
        f"importing {subject.module_name!r} took {seconds:.1f} s, {allowed:g} s are allowed, most "
        f"of it for {subject.probe['slowest']}; do "
        "nothing at import (no file, no network, no model), move the work into the factory",
    )


def hooks_are_valid(subject: PluginSubject) -> None:
    """Every hook exists, has documented arguments, and provides valid specs."""
    demand(subject.manager.plugins, "unreachable")


def provides_the_same_twice(subject: PluginSubject) -> None:
    """The provide_ hooks return equal specs each time."""
    first = subject.specs
    again = PluginSubject(name=subject.name, module_name=subject.module_name, module=subject.loaded)
    second = again.specs
    demand(
        first == second,
        f"the provide_ hooks returned {_names(first)}, then {_names(second)}; return the same "
        "specs each time, built from constants",
    )


def factories_can_be_imported(subject: PluginSubject) -> None:
    """Every spec's factory, and converter of a preset, exists and can be called."""
    for spec in subject.specs:
        try:
            subject.manager.resolve(spec)
        except PluginError as error:
            raise CheckFailed(
                f'{error}; correct the spec\'s `factory` ("module:Class"), or the module it names'
            ) from error


def the_name_is_its_own(subject: PluginSubject) -> str | None:
    """No other package has a plugin of the same name: only one of them is loaded by it."""
    found = None if subject.is_loose else installed(subject.name)
    if found is None:
        raise CheckSkipped("the plugin is not installed")
    lost = [each for each in discover().failures if each.error.endswith(NAME_TAKEN)]
    lost = [each for each in lost if normalise(each.plugin) == normalise(found.origin.name)]
    demand(
        not lost,
        f"{found.origin} is checked; the one of {_packages(lost)} has the same name, and is not "
        "loaded: give its entry point another name",
    )
    for other in discover().plugins:
        if other.origin != found.origin and normalise(subject.name) in other.origin.names:
            return f"{found.origin} is checked; {other.full_name} names the other of this name"
    return None


def names_are_unique(subject: PluginSubject) -> str | None:
    """No other package claims the same name or architecture at the same priority; a built-in plugin
    may: what somebody has installed comes first."""
    found = None if subject.is_loose else installed(subject.name)
    own = 2 if subject.file is not None else 1 if found is None else found.origin.standing
    taken: dict[tuple[str, int], PluginOrigin] = {}
    others = PluginManager.load(files=subject.beside)
    for spec in _specs(others):
        origin = others.origin(spec)
        if origin.module not in (subject.module_name, str(subject.file)):
            taken |= {(claim, spec.priority): origin for claim in claims(spec)}
    notes = []
    for spec in subject.specs:
        for claim in claims(spec):
            owner = taken.get((claim, spec.priority))
            if owner is None:
                continue
            demand(
                owner.standing != own,
                f"{describe(spec)} claims {claim} at priority {spec.priority}, as the installed "
                f"plugin {owner.name!r} does, so the choice is ambiguous; rename it, or set "
                "another `priority` (the highest wins)",
            )
            pair = [subject.name, owner.name]
            first, second = pair if own > owner.standing else pair[::-1]
            notes.append(f"{claim} is served by {first!r}, not by {second!r}")
    if not notes:
        return None
    key = next(iter(use_keys(subject.specs[0])))
    return f"{'; '.join(notes)}: use={{{key!r}: ...}} (--use) and blocked_plugins choose otherwise"


def hooks_take_what_is_documented(subject: PluginSubject) -> None:
    """Observers, fetchers and CLI extensions accept the documented arguments and do not raise."""
    checked = False
    for hook, arguments in example_arguments().items():
        if not subject.has_hook(hook):
            continue
        checked = True
        function = getattr(subject.loaded, hook)
        given = {name: arguments[name] for name in inspect.signature(function).parameters}
        with attributed(f"{hook}({', '.join(given)})", "let the hook accept any valid argument"):
            try:
                answer = function(**given)
            except MediaError:
                continue
        is_bytes = hook == "fetch_media" and isinstance(answer, bytes)
        demand(
            answer is None or is_bytes,
            f"{hook} returns a {type(answer).__name__}; "
            + ("return bytes, or None to pass" if hook == "fetch_media" else "return nothing"),
        )
    if not checked:
        raise CheckSkipped("the plugin only provides specs")


CHECKS: tuple[Check, ...] = (
    imports_in_a_fresh_process,
    lists_without_torch,
    imports_quickly,
    hooks_are_valid,
    provides_the_same_twice,
    factories_can_be_imported,
    the_name_is_its_own,
    names_are_unique,
    hooks_take_what_is_documented,
)


def _specs(manager: PluginManager) -> tuple[Spec, ...]:
    return (
        *manager.models,
        *manager.reasoning_parsers,
        *manager.tool_parsers,
        *manager.logits_processors,
        *manager.media_processors,
        *manager.reading_presets,
    )


def _names(specs: Sequence[Spec]) -> str:
    return ", ".join(map(describe, specs)) or "nothing"


def _packages(failures: Sequence[PluginFailure]) -> str:
    return " and ".join(str(failure.distribution) for failure in failures)
