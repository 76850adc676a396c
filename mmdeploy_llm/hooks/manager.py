"""PluginManager: loads plugins one by one, keeps what each provides, and calls their hooks in isolation.

    discover --> import --> register --> provide --> select, build, fetch, notify, extend
      |            |           |            |
      +------------+-----------+------------+--> PluginFailure: recorded, warned about once, never fatal
                                                 unless the plugin was asked for by name

A failure here never hides another plugin. What failed is told again to whoever later misses something.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import pluggy

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    PluginError,
    PluginLoadError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.messages import MediaRef

from . import discovery, factories, selection, specs
from .contracts import (
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
    Model,
    ModelSpec,
    ReasoningParser,
    ReasoningParserSpec,
)
from .names import error_text
from .records import (
    FAULTS,
    Phase,
    PluginFailure,
    PluginInfo,
    PluginOrigin,
    Provided,
    Spec,
    describe,
)
from .validation import PROVIDED, check_impl, checked_specs, no_hooks_error

MAX_SHOWN_URI = 80  # characters; a data: URL can be megabytes long

logger = logging.getLogger(__name__)


class PluginManager:
    """The plugins of one engine or one program run. Only its own methods change it.

    `load` and `register` come first, from one thread. After that `fetch_media` and all questions may be
    asked from any thread; `notify` belongs to the thread that steps the engine.
    """

    def __init__(self) -> None:
        """A manager without plugins."""
        self._pluggy = pluggy.PluginManager(specs.PROJECT)
        self._pluggy.add_hookspecs(specs)
        self._hooks = tuple(name for name in vars(self._pluggy.hook) if not name.startswith("_"))
        self._origins: dict[str, PluginOrigin] = {}  # in load order, those that failed included
        self._provided: list[Provided[Any]] = []
        self._failures: list[PluginFailure] = []
        self._muted: set[tuple[str, str]] = set()  # (plugin, hook) of observers that raised

    @classmethod
    def load(
        cls, plugins: Sequence[str] | None = None, blocked: Sequence[str] = ()
    ) -> PluginManager:
        """A manager with the installed plugins, loaded in the order of their names.

        plugins: None for all; a sequence for exactly these, none of which may be missing or fail
        (PluginLoadError with the cause). blocked: those not to load. Raises ConfigError for a plugin
        that is both asked for and blocked.
        """
        manager = cls()
        found = discovery.discover()
        for failure in found.failures:
            manager._record(failure)
        for plugin in discovery.select(found.plugins, plugins, blocked):
            discovery.warn_of_version_mismatch(plugin)
            manager._load(plugin.origin, plugin.entry_point.load, is_strict=plugins is not None)
        return manager

    def register(self, plugin: object, name: str) -> None:
        """Adds a module or an object with hook implementations. Raises PluginLoadError, and then adds nothing."""
        module = getattr(plugin, "__name__", type(plugin).__name__)
        self._load(PluginOrigin(name=name, module=module), lambda: plugin, is_strict=True)

    # What is loaded.

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin in load order, those that failed included."""
        return tuple(self._info(origin) for origin in self._origins.values())

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """What went wrong so far."""
        return tuple(self._failures)

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """All model specs, in load order."""
        return tuple(item.spec for item in self._provided if isinstance(item.spec, ModelSpec))

    @property
    def reasoning_parsers(self) -> tuple[ReasoningParserSpec, ...]:
        """All reasoning parser specs, in load order."""
        return tuple(
            item.spec for item in self._provided if isinstance(item.spec, ReasoningParserSpec)
        )

    @property
    def media_processors(self) -> tuple[MediaProcessorSpec, ...]:
        """All media processor specs, in load order."""
        return tuple(
            item.spec for item in self._provided if isinstance(item.spec, MediaProcessorSpec)
        )

    def failure_note(self) -> str:
        """The recorded failures as the end of an error message; "" when there are none."""
        if not self._failures:
            return ""
        return "\nPlugins that failed:" + "".join(f"\n - {failure}" for failure in self._failures)

    # Which spec serves what.

    def model_for(self, architectures: Sequence[str]) -> ModelSpec:
        """The spec that serves a checkpoint with these architectures; the first that is served counts.

        Raises ModelNotSupportedError when none is, PluginConflictError on a tie.
        """
        return selection.select_model(self._of(ModelSpec), architectures, self.failure_note())

    def reasoning_parser(self, name: str) -> ReasoningParserSpec:
        """The parser of this name; "_" is "-" and case does not matter.

        Raises ConfigError when there is none, PluginConflictError on a tie.
        """
        return selection.select_parser(self._of(ReasoningParserSpec), name, self.failure_note())

    def media_processor(self, kind: str, model: str) -> MediaProcessorSpec | None:
        """The processor of `kind` for the model family (a ModelSpec's name), None when there is none.

        One that names the family beats one for "*", then priority counts. Raises PluginConflictError on a tie.
        """
        return selection.select_processor(self._of(MediaProcessorSpec), kind, model)

    def owner(self, spec: Spec) -> str:
        """The name of the plugin that provided `spec`."""
        return self._origin(spec).name

    # From a spec to an object.

    def resolve(self, spec: Spec) -> Callable[..., Any]:
        """The factory of `spec`, imported. Raises PluginError, which names the plugin and its package."""
        return factories.resolve(spec, self._origin(spec))

    @overload
    def build(self, spec: ModelSpec, *args: Any) -> Model: ...
    @overload
    def build(self, spec: ReasoningParserSpec, *args: Any) -> ReasoningParser: ...
    @overload
    def build(self, spec: MediaProcessorSpec, *args: Any) -> MediaProcessor: ...
    def build(self, spec: Spec, *args: Any) -> Any:
        """What the factory of `spec` makes of `args`; never the one of another plugin instead.

        Errors of this package pass through, anything else raises PluginError that names the plugin.
        Raises PluginContractError when the result is not what the spec promises.
        """
        return factories.build(spec, self._origin(spec), args)

    # Calls into plugins.

    def fetch_media(self, ref: MediaRef, limits: MediaLimits) -> bytes:
        """The bytes behind `ref`, from the first plugin that has them. Safe from several threads.

        A RequestError of a plugin passes through; whatever else goes wrong in it is a MediaError that
        names it. Raises UnsupportedMediaError when no plugin answers.
        """
        for impl in self._impls("fetch_media"):
            try:
                blob = _call(impl, {"ref": ref, "limits": limits})
            except RequestError:
                raise
            except FAULTS as error:
                raise MediaError(
                    f"{self._origins[impl.plugin_name]} failed to fetch {_shown_uri(ref)}: {error_text(error)}"
                ) from error
            if blob is not None:
                return self._checked_blob(blob, impl.plugin_name, ref, limits)
        fetchers = [impl.plugin_name for impl in self._impls("fetch_media")]
        raise UnsupportedMediaError(
            f"{ref.kind} {_shown_uri(ref)} is of no form that is accepted. By name: a path or file:// URL, a data: "
            "URL, an http:// or https:// URL where URLs are allowed; by value: bytes or a loaded object. "
            f"Plugins asked: {', '.join(fetchers) or 'none is loaded that fetches media'}{self.failure_note()}"
        )

    def notify(self, hook: str, **arguments: Any) -> None:
        """Tells every observer of an on_ hook. One that raises is logged once and not told again."""
        assert hook.startswith("on_") and hook in self._hooks, hook
        for impl in self._impls(hook):
            if (impl.plugin_name, hook) in self._muted:
                continue
            try:
                _call(impl, arguments)
            except FAULTS as error:
                self._muted.add((impl.plugin_name, hook))
                self._fail(
                    self._origins[impl.plugin_name], "observe", error, f"{hook} is not called again"
                )

    def extend_cli(self, app: Any) -> None:
        """Lets plugins add commands to the typer app. The commands of one that raises are missing, with a warning."""
        for impl in self._impls("extend_cli"):
            try:
                _call(impl, {"app": app})
            except FAULTS as error:
                self._fail(
                    self._origins[impl.plugin_name], "extend", error, "its commands are missing"
                )

    # Loading one plugin.

    def _load(
        self, origin: PluginOrigin, get_plugin: Callable[[], object], *, is_strict: bool
    ) -> None:
        """Imports, registers and asks one plugin. A failure raises PluginLoadError when strict, else is recorded."""
        if is_strict and origin.name in self._origins:
            raise PluginLoadError(
                f"a plugin named {origin.name!r} is loaded already; choose another name"
            )
        phase: Phase = "import"
        self._origins[origin.name] = origin
        try:
            plugin = get_plugin()
            phase = "register"
            self._register(plugin, origin.name)
            phase = "provide"
            self._collect(plugin, origin, is_strict=is_strict)
        except FAULTS as error:
            if not is_strict:
                self._fail(origin, phase, error, "it is not loaded")
                return
            self._forget(origin.name)
            raise PluginLoadError(
                f"{origin} cannot be loaded: {phase}: {error_text(error)}"
            ) from error

    def _register(self, plugin: object, name: str) -> None:
        """Registers `plugin`, or raises and leaves nothing of it behind (pluggy 1.6 would leave half)."""
        other = self._pluggy.get_name(plugin)
        if other is not None:
            raise PluginLoadError(f"it is the same object as plugin {other!r}")
        try:
            self._pluggy.register(plugin, name)
            impls = list(self._impls_of(plugin))
            for hook, impl in impls:
                check_impl(hook, impl, self._hooks)
            if not impls:
                raise no_hooks_error(plugin, self._hooks)
        except BaseException:
            if self._pluggy.is_registered(plugin):
                self._pluggy.unregister(plugin)
            raise

    def _collect(self, plugin: object, origin: PluginOrigin, *, is_strict: bool) -> None:
        """Calls the provide_ hooks of one plugin, once, and keeps the specs. A failure costs that hook only."""
        for hook, impl in self._impls_of(plugin):
            if hook not in PROVIDED:
                continue
            try:
                found = checked_specs(hook, _call(impl, {}))
            except FAULTS as error:
                if is_strict:
                    raise
                self._fail(origin, "provide", error, f"{hook} gives nothing")
            else:
                self._provided += [Provided(spec=spec, origin=origin) for spec in found]

    def _forget(self, name: str) -> None:
        """Takes back everything that a plugin has registered and provided."""
        origin = self._origins.pop(name)
        self._provided = [item for item in self._provided if item.origin is not origin]
        if self._pluggy.has_plugin(name):
            self._pluggy.unregister(name=name)

    def _fail(
        self, origin: PluginOrigin, phase: Phase, error: BaseException, consequence: str
    ) -> None:
        """Records a failure, with one warning; the traceback is logged at debug level."""
        self._record(discovery.failure(origin, phase, error_text(error)), consequence)
        logger.debug("traceback of %s", origin, exc_info=error)

    def _record(self, failure: PluginFailure, consequence: str = "it is not loaded") -> None:
        self._failures.append(failure)
        logger.warning("plugin %s; %s", failure, consequence)

    # Looking things up.

    def _impls(self, hook: str) -> list[pluggy.HookImpl]:
        """The implementations of a hook in the order of their calls."""
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        return caller.get_hookimpls()[::-1]

    def _impls_of(self, plugin: object) -> Iterator[tuple[str, pluggy.HookImpl]]:
        """The (hook name, implementation) pairs of one registered plugin."""
        for caller in self._pluggy.get_hookcallers(plugin) or ():
            for impl in caller.get_hookimpls():
                if impl.plugin is plugin:
                    yield caller.name, impl

    def _of(self, kind: type[Any]) -> list[Provided[Any]]:
        return [item for item in self._provided if isinstance(item.spec, kind)]

    def _origin(self, spec: Spec) -> PluginOrigin:
        for item in self._provided:
            if item.spec is spec:
                return item.origin
        raise PluginError(
            f"{describe(spec)} was provided by no plugin of this manager; take specs from its methods"
        )

    def _info(self, origin: PluginOrigin) -> PluginInfo:
        provides = [describe(item.spec) for item in self._provided if item.origin is origin]
        plugin = self._pluggy.get_plugin(origin.name)
        hooks = {hook for hook, _ in self._impls_of(plugin)} - set(PROVIDED) if plugin else ()
        return PluginInfo(
            name=origin.name,
            module=origin.module,
            distribution=origin.distribution,
            version=origin.version,
            provides=(*provides, *(f"hook {hook}" for hook in sorted(hooks))),
            failures=tuple(failure for failure in self._failures if failure.plugin == origin.name),
        )

    def _checked_blob(self, blob: object, name: str, ref: MediaRef, limits: MediaLimits) -> bytes:
        """`blob`, which must be bytes and within the limits."""
        if not isinstance(blob, bytes):
            raise MediaError(
                f"{self._origins[name]} must return bytes or None for {_shown_uri(ref)}, got {type(blob).__name__}"
            )
        if len(blob) > limits.max_bytes:
            raise MediaLimitError(
                f"{ref.kind} {_shown_uri(ref)} has {len(blob)} bytes, {limits.max_bytes} are allowed; "
                "raise max_media_bytes or shrink it"
            )
        return blob


def _call(impl: pluggy.HookImpl, arguments: dict[str, Any]) -> Any:
    """One implementation, with the arguments it names."""
    return impl.function(*(arguments[name] for name in impl.argnames))


def _shown_uri(ref: MediaRef) -> str:
    return repr(ref.uri if len(ref.uri) <= MAX_SHOWN_URI else ref.uri[: MAX_SHOWN_URI - 3] + "...")
