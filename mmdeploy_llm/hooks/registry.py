"""PluginRegistry: adds plugins one by one, so that one that fails never hides another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pluggy

from mmdeploy_llm.errors import PluginContractError, PluginError, PluginLoadError
from mmdeploy_llm.hooks.versions import api_problems

from . import specs
from .names import error_text
from .records import (
    FAULTS,
    Phase,
    PluginFailure,
    PluginInfo,
    PluginOrigin,
    Provided,
    Spec,
    SpecT,
    describe,
    failure_of,
)
from .validation import PROVIDED, check_hooks, checked_specs

logger = logging.getLogger(__name__)
MAX_IMPORT_SECONDS = 3.0  # of an installed package; every start of the program waits for it


class PluginRegistry:
    """Registered plugins, the specs they provided and the failures on the way.

    Only its own methods change it, called by one PluginManager. Each failure logs one warning, with
    the traceback at debug level.
    """

    def __init__(self) -> None:
        """Makes a registry without plugins."""
        self._pluggy = pluggy.PluginManager(specs.PROJECT)
        self._pluggy.add_hookspecs(specs)
        self.hooks = tuple(name for name in vars(self._pluggy.hook) if not name.startswith("_"))
        self._origins: dict[str, PluginOrigin] = {}  # in load order, failed ones included
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._observed: dict[str, tuple[str, ...]] = {}  # hooks of a plugin that provide no specs
        self._provided: list[Provided[Any]] = []
        self._failures: list[PluginFailure] = []

    def add(
        self,
        origin: PluginOrigin,
        get_plugin: Callable[[], object],
        *,
        is_strict: bool,
        problems: tuple[str, ...] = (),
    ) -> None:
        """Imports and registers one plugin and calls its provide_ hooks.

        When strict, a failure raises PluginLoadError and nothing of the plugin remains; else it is
        recorded. problems: of versions, which are warnings, and stand in the text of a failure.
        """
        if origin.name in self._origins:
            raise PluginLoadError(
                f"a plugin named {origin.name!r} is loaded already; choose another name"
            )
        phase: Phase = "import"
        self._origins[origin.name] = origin
        try:
            begin = time.monotonic()
            plugin = get_plugin()
            problems += (*api_problems(plugin), *_slowness(origin, time.monotonic() - begin))
            self._warnings[origin.name] = problems
            phase = "register"
            self._register(plugin, origin.name)
            phase = "provide"
            self._collect(plugin, origin, is_strict=is_strict)
        except FAULTS as error:
            text = "; ".join([error_text(error), *problems])
            if not is_strict:
                self.fail(origin.name, phase, error, "it is not loaded", text)
                return
            self._forget(origin.name)
            raise PluginLoadError(f"{origin} cannot be loaded: {phase}: {text}") from error
        for problem in problems:
            logger.warning("%s: %s", origin, problem)

    def fail(
        self, name: str, phase: Phase, error: BaseException, consequence: str, text: str = ""
    ) -> None:
        """Records an exception of a plugin. consequence: the end of the warning. text: says more
        than the exception."""
        failure = failure_of(self._origins[name], phase, text or error_text(error))
        self.record(failure, consequence)
        logger.debug("traceback of %s", self._origins[name], exc_info=error)

    def record(self, failure: PluginFailure, consequence: str) -> None:
        """Records a failure and logs one warning."""
        self._failures.append(failure)
        logger.warning("plugin %s; %s", failure, consequence)

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """All recorded failures."""
        return tuple(self._failures)

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin in load order, failed ones included."""
        return tuple(self._info(origin) for origin in self._origins.values())

    @property
    def all_provided(self) -> tuple[Provided[Any], ...]:
        """All specs of all types, in load order."""
        return tuple(self._provided)

    def provided(self, kind: type[SpecT]) -> tuple[Provided[SpecT], ...]:
        """Returns all specs of one type, in load order."""
        return tuple(item for item in self._provided if isinstance(item.spec, kind))

    def origin(self, spec: Spec) -> PluginOrigin:
        """Returns the origin of this very spec object. Raises PluginError for an unknown one."""
        for item in self._provided:
            if item.spec is spec:
                return item.origin
        raise PluginError(
            f"{describe(spec)} comes from no plugin of this manager; take specs from its methods"
        )

    def plugin(self, name: str) -> PluginOrigin:
        """Returns the origin of the plugin with this name."""
        return self._origins[name]

    def impls(self, hook: str) -> list[pluggy.HookImpl]:
        """Returns the implementations of a hook in call order."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        return caller.get_hookimpls()[::-1]

    def _register(self, plugin: object, name: str) -> None:
        """Registers `plugin`, or raises and undoes the registration (pluggy 1.6 leaves half of
        it)."""
        other = self._pluggy.get_name(plugin)
        if other is not None:
            file = getattr(plugin, "__file__", None)
            raise PluginLoadError(
                f"it is the same object as {self._origins[other]}"
                + (f", {file}: if both packages have a module of this name, " if file else ": ")
                + "rename one of them, or let one entry point name it"
            )
        try:
            check_hooks(plugin, self._pluggy)
            self._pluggy.register(plugin, name)
        except BaseException:
            if self._pluggy.has_plugin(name):
                self._pluggy.unregister(name=name)
            raise

    def _collect(self, plugin: object, origin: PluginOrigin, *, is_strict: bool) -> None:
        """Calls the provide_ hooks of one plugin, once. A failure loses that hook's specs only."""
        impls = list(self._impls_of(plugin))
        others = {hook for hook, _ in impls} - set(PROVIDED)
        self._observed[origin.name] = tuple(f"hook {hook}" for hook in sorted(others))
        faults: list[BaseException] = []
        for hook, impl in [pair for hook in PROVIDED for pair in impls if pair[0] == hook]:
            try:
                found = checked_specs(hook, call(impl, {}))
            except FAULTS as error:
                faults.append(error)
                if not is_strict:
                    self.fail(origin.name, "provide", error, f"{hook} provides nothing")
            else:
                self._provided += [Provided(spec=spec, origin=origin) for spec in found]
        if is_strict and faults:
            if len(faults) == 1:
                raise faults[0]
            raise PluginContractError("; ".join(map(error_text, faults)))

    def _forget(self, name: str) -> None:
        """Removes everything that a plugin has registered and provided."""
        origin = self._origins.pop(name)
        self._observed.pop(name, None)
        self._provided = [item for item in self._provided if item.origin is not origin]
        if self._pluggy.has_plugin(name):
            self._pluggy.unregister(name=name)

    def _impls_of(self, plugin: object) -> Iterator[tuple[str, pluggy.HookImpl]]:
        """Yields the (hook name, implementation) pairs of one registered plugin."""
        for caller in self._pluggy.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    yield caller.name, impl

    def _info(self, origin: PluginOrigin) -> PluginInfo:
        provides = [describe(item.spec) for item in self._provided if item.origin is origin]
        return PluginInfo(
            name=origin.name,
            module=origin.module,
            distribution=origin.distribution,
            version=origin.version,
            provides=(*provides, *self._observed.get(origin.name, ())),
            failures=tuple(item for item in self._failures if item.plugin == origin.name),
            warnings=self._warnings.get(origin.name, ()),
        )


def call(impl: pluggy.HookImpl, arguments: dict[str, Any]) -> Any:
    """Calls one implementation with the arguments that it names."""
    return impl.function(*(arguments[name] for name in impl.argnames))


def _slowness(origin: PluginOrigin, seconds: float) -> tuple[str, ...]:
    """Returns what is told of a package whose import holds up every start, used or not."""
    if origin.is_builtin or origin.distribution is None or seconds <= MAX_IMPORT_SECONDS:
        return ()
    return (f"its import took {seconds:.1f} s, as at every start; blocked_plugins leaves it out",)
