"""PluginManager: loads plugins, selects the one that serves a request, and calls them in isolation.

    discover -> import -> register -> provide -> select, build, fetch, notify, extend
       |           |          |          |
       +-----------+----------+----------+-> PluginFailure: recorded, warned about once, fatal only
                                             for plugins that were requested by name

Recorded failures are repeated in the error of whoever later misses what the plugin would provide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import pluggy

from mmdeploy_llm.errors import MediaError, PluginContractError, RequestError, UnsupportedMediaError
from mmdeploy_llm.hooks.files import load_file
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, AttentionBackendSpec
from mmdeploy_llm.hooks.objects.logits import LogitsProcessor, LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.model import Model
from mmdeploy_llm.hooks.objects.model_files import ModelFile, ModelFileSpec
from mmdeploy_llm.hooks.objects.parsing import ReasoningParser, ToolParser
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.store import OutputSinkSpec, RecordStore
from mmdeploy_llm.messages import MediaRef
from mmdeploy_llm.system.guarding.calls import CallGuard

from . import discovery, factories, names, selection
from .contracts import (
    MediaLimits,
    MediaProcessor,
    MediaProcessorSpec,
    ModelSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)
from .kinds import KindTable, table_of
from .names import error_text, listing
from .records import (
    FAULTS,
    FactorySpec,
    NamedSpecT,
    PluginFailure,
    PluginInfo,
    PluginOrigin,
    Provided,
    Spec,
    SpecT,
    describe,
)
from .registry import PluginRegistry, call
from .splitting import MediaSplitter
from .validation import checked_blob

if TYPE_CHECKING:
    from mmdeploy_llm.values.options.plugin_choice import PluginChoice

T = TypeVar("T")
NO_CHOICE: Mapping[str, str] = MappingProxyType({})


class PluginManager:
    """The plugins of one engine or one program run. Only its own methods change it.

    guard: runs the plugins' calls for each media item, within time limits.

    `load` and `register` come first, from one thread. After that `fetch_media` and all queries may
    be called from any thread; `notify` belongs to the thread that steps the engine.
    """

    def __init__(self, use: Mapping[str, str] = NO_CHOICE) -> None:
        """Makes a manager without plugins. use: see `load`."""
        self._chooser = selection.Chooser(use)
        self.guard = CallGuard()
        self._registry = PluginRegistry()
        self._muted: set[tuple[str, str]] = set()  # (plugin, hook) of observers that raised

    @classmethod
    def load(
        cls,
        plugins: Sequence[str] | None = None,
        blocked: Sequence[str] = (),
        use: Mapping[str, str] = NO_CHOICE,
        files: Sequence[str | Path] = (),
        core: bool = False,
    ) -> PluginManager:
        """Returns a manager with the installed plugins, loaded in the order of their names.

        plugins: None for all; a sequence for exactly these, none of which may be missing or fail.
        blocked: plugins that are not loaded.
        use: name of an architecture, parser, logits processor or kind of media -> the plugin that
            serves it, whatever the priorities.
        files: Python files, each a plugin of its own, none of which may be missing or fail.
        core: whether to load also the built-in plugins that every engine needs.
        Raises PluginLoadError, with the cause, for a named plugin that is missing or fails, and
        ConfigError for one that is both named and blocked, or in `use` and not loaded.
        """
        manager = cls(use)
        found = discovery.discover()
        for failure in found.failures:
            manager._registry.record(failure, "it is not loaded")
        for plugin in discovery.select(found.plugins, plugins, blocked, core=core):
            manager._registry.add(
                plugin.origin,
                plugin.entry_point.load,
                is_strict=plugins is not None,
                problems=plugin.problems,
            )
        for origin in discovery.files_of(files, blocked, found.plugins):
            assert origin.file is not None
            manager._registry.add(origin, partial(load_file, origin.file), is_strict=True)
        out = f". blocked_plugins: {listing(blocked)}" if blocked else ""
        selection.check_use(use, manager._registry.all_provided, f"{out}{manager._note()}")
        return manager

    @classmethod
    def of(cls, config: PluginChoice) -> PluginManager:
        """Returns a manager with the plugins that an engine's options choose, see `load`."""
        chosen = config.plugins, config.blocked_plugins, config.use, config.plugin_files
        return cls.load(*chosen, core=True)

    @property
    def choices(self) -> Mapping[str, str]:
        """The choices among plugins so far, as `use` would say them."""
        return self._chooser.told

    def register(self, plugin: object, name: str) -> None:
        """Adds a module or an object with hook implementations.

        Raises PluginLoadError when anything is wrong with it, and then adds nothing.
        """
        origin = PluginOrigin(name=name, module=getattr(plugin, "__name__", type(plugin).__name__))
        self._registry.add(origin, lambda: plugin, is_strict=True)

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin in load order, failed ones included."""
        return self._registry.plugins

    @property
    def failures(self) -> tuple[PluginFailure, ...]:
        """All recorded failures."""
        return self._registry.failures

    @property
    def specs(self) -> tuple[Spec, ...]:
        """All specs of all kinds, in load order."""
        return tuple(item.spec for item in self._registry.all_provided)

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """All model specs, in load order."""
        return self.provided(ModelSpec)

    @property
    def reasoning_parsers(self) -> tuple[ReasoningParserSpec, ...]:
        """All reasoning parser specs, in load order."""
        return self.provided(ReasoningParserSpec)

    @property
    def tool_parsers(self) -> tuple[ToolParserSpec, ...]:
        """All tool parser specs, in load order."""
        return self.provided(ToolParserSpec)

    @property
    def logits_processors(self) -> tuple[LogitsProcessorSpec, ...]:
        """All logits processor specs, in load order."""
        return self.provided(LogitsProcessorSpec)

    @property
    def media_processors(self) -> tuple[MediaProcessorSpec, ...]:
        """All media processor specs, in load order."""
        return self.provided(MediaProcessorSpec)

    @property
    def reading_presets(self) -> tuple[ReadingPreset, ...]:
        """All presets of reading, in load order."""
        return self.provided(ReadingPreset)

    @property
    def kinds(self) -> KindTable:
        """The kinds of media of all loaded specs, formats of corpora and of outputs, parts of
        messages: suffixes, columns, first bytes, types. Built anew for each call: take it once."""
        return table_of(self._registry.all_provided, self._chooser)

    def _note(self) -> str:
        """Returns the loaded plugins and the recorded failures as the end of an error message."""
        loaded = [plugin.name for plugin in self.plugins if plugin.provides]
        return f". Loaded plugins: {listing(loaded)}{self.failure_note()}"

    def failure_note(self) -> str:
        """Returns the recorded failures as the end of an error message; "" when there are none."""
        if not self.failures:
            return ""
        return "\nPlugins that failed:" + "".join(f"\n - {failure}" for failure in self.failures)

    def model_for(self, architectures: Sequence[str], config: Any = None) -> ModelSpec:
        """Returns the spec for the first of these architectures that a plugin serves. config: of
        the model, which a plugin may refuse; None: none is asked.

        Raises ModelNotSupportedError when none is served, PluginConflictError on a tie.
        """
        models = self._registry.provided(ModelSpec)
        self._chooser.tell_unused(architectures, self._registry.all_provided)
        ask = partial(factories.refusal, config)
        return selection.select_model(models, architectures, self._note(), self._chooser, ask)

    def reasoning_parser(self, name: str) -> ReasoningParserSpec:
        """Returns the parser of this name or alias; "_" equals "-" and case does not matter.

        Raises ConfigError when there is none, PluginConflictError on a tie.
        """
        return self.named(ReasoningParserSpec, "reasoning parser", name)

    def tool_parser(self, name: str) -> ToolParserSpec:
        """Returns the parser of tool calls, found as in `reasoning_parser`."""
        return self.named(ToolParserSpec, "tool parser", name)

    def logits_processor(self, name: str) -> LogitsProcessorSpec:
        """Returns the logits processor of this name, found as in `reasoning_parser`."""
        return self.named(LogitsProcessorSpec, "logits processor", name)

    def reading_preset(self, name: str) -> ReadingPreset:
        """Returns the preset of this name, found as in `reasoning_parser`."""
        return self.named(ReadingPreset, "reading preset", name)

    def reading_preset_for(self, architecture: str, about: str) -> ReadingPreset | None:
        """Returns the preset for models of an architecture, None without one. about: the model's
        name, config and card, in which marks are sought. Raises PluginConflictError on a tie."""
        presets = self._registry.provided(ReadingPreset)
        return selection.select_preset(presets, architecture, about, self._chooser)

    def provided(self, of: type[SpecT]) -> tuple[SpecT, ...]:
        """Returns all specs of one type, in load order."""
        return tuple(item.spec for item in self._registry.provided(of))

    def named(self, of: type[NamedSpecT], kind: str, name: str) -> NamedSpecT:
        """Returns the spec of this name or alias, found as in `reasoning_parser`. kind: what the
        specs are called in messages."""
        provided = self._registry.provided(of)
        return selection.select_named(provided, kind, name, self._note(), self._chooser)

    def media_processor(
        self, kind: str, model: str, *, spec: ModelSpec | None = None
    ) -> MediaProcessorSpec | None:
        """Returns the processor of `kind` for a model family (a ModelSpec's name), None without
        one.

        One that names the family beats one for "*", then priority decides. spec: of the model that
        runs; if `use` has chosen its plugin, the plugin's own processors come first. Raises
        PluginConflictError on a tie.
        """
        provided = self._registry.provided(MediaProcessorSpec)
        server = None
        if spec is not None:
            server = Provided(spec=spec, origin=self._registry.origin(spec))
        return selection.select_processor(provided, kind, model, self._chooser, server)

    def preferred(self, specs: Sequence[SpecT], wanted: str, key: str) -> SpecT:
        """Returns the spec that comes first of those that claim the same, as in `model_for`.

        wanted: the claim, for messages. key: the name by which `use` decides. Raises
        PluginConflictError on a tie.
        """
        found = [Provided(spec=spec, origin=self._registry.origin(spec)) for spec in specs]
        return self._chooser.top(found, wanted, key).spec

    def origin(self, spec: Spec) -> PluginOrigin:
        """Returns where the plugin that provided `spec` comes from."""
        return self._registry.origin(spec)

    def owner(self, spec: Spec) -> str:
        """Returns the name of the plugin that provided `spec`."""
        return self._registry.origin(spec).name

    def described(self, spec: Spec) -> str:
        """Names `spec` and the plugin that provided it, for messages."""
        return f"{describe(spec)} of {self._registry.origin(spec)}"

    def resolve(self, spec: Spec) -> Callable[..., Any]:
        """Imports the factory of `spec`, or what it names instead: see factories.resolve. Raises
        PluginError naming the plugin and its package."""
        return factories.resolve(spec, self._registry.origin(spec))

    def gguf_table(self, spec: ModelSpec, kind: type[T]) -> T:
        """Imports the GGUF table of `spec`, which names one. kind: its class, of a room that this
        one does not know. Raises PluginError, naming the plugin, when there is no such table."""
        assert spec.gguf is not None
        about = f"{self._registry.origin(spec)}: {spec.gguf}, the GGUF table of model {spec.name},"
        found = factories.imported_for(spec.gguf, about)
        if not isinstance(found, kind):
            raise PluginContractError(
                f"{about} must be a {kind.__name__}, got {type(found).__name__}"
            )
        return found

    @overload
    def build(self, spec: ModelSpec, *args: Any) -> Model: ...
    @overload
    def build(self, spec: ReasoningParserSpec, *args: Any) -> ReasoningParser: ...
    @overload
    def build(self, spec: ToolParserSpec, *args: Any) -> ToolParser: ...
    @overload
    def build(self, spec: LogitsProcessorSpec, *args: Any) -> LogitsProcessor: ...
    @overload
    def build(self, spec: OutputSinkSpec, *args: Any) -> RecordStore: ...
    @overload
    def build(self, spec: ModelFileSpec, *args: Any) -> ModelFile: ...
    @overload
    def build(self, spec: AttentionBackendSpec, *args: Any) -> AttentionBackend: ...
    @overload
    def build(self, spec: MediaProcessorSpec, *args: Any) -> MediaProcessor: ...
    def build(self, spec: FactorySpec, *args: Any) -> Any:
        """Calls the factory of `spec` with `args`; never falls back to another plugin.

        Errors of this package pass through; any other raises ModelNotSupportedError for a model,
        else PluginError, and names the plugin. Raises PluginContractError when the result is not
        what the spec promises.
        """
        note = self._chooser.refusals.get(spec.name, "")
        return factories.build(spec, self._registry.origin(spec), args, note)

    def build_splitter(self, spec: MediaProcessorSpec, *args: Any) -> MediaSplitter:
        """Calls the factory of a spec with `yields`, as `build` does."""
        assert spec.yields is not None, spec
        built: MediaSplitter = factories.build(spec, self._registry.origin(spec), args)
        return built

    def fetch_media(self, ref: MediaRef, limits: MediaLimits) -> bytes:
        """Returns the bytes of `ref` from the first plugin that has them. Thread-safe.

        A RequestError of a plugin passes through; any other exception becomes a MediaError that
        names the plugin. Raises MediaTimeoutError after `fetch_timeout` in total, and
        UnsupportedMediaError when no plugin answers.
        """
        impls = self._registry.impls("fetch_media")
        end = time.monotonic() + limits.fetch_timeout
        for impl in impls:
            origin = self._registry.plugin(impl.plugin_name)
            blob = self._fetch_from(impl, origin, ref, limits, end - time.monotonic())
            if blob is not None:
                return checked_blob(blob, origin, ref, limits)
        raise UnsupportedMediaError(
            f"{ref.kind} {names.shown_uri(ref)} has no accepted form. Give a path, a file:// or "
            "data: URL, an http(s):// URL where URLs are allowed, bytes or a loaded object. "
            f"Plugins tried: {listing(impl.plugin_name for impl in impls)}"
            f"{self.failure_note()}"
        )

    def _fetch_from(
        self,
        impl: pluggy.HookImpl,
        origin: PluginOrigin,
        ref: MediaRef,
        limits: MediaLimits,
        seconds: float,
    ) -> object:
        """Calls one plugin's `fetch_media` within `seconds`."""
        try:
            return self.guard.run(
                lambda: call(impl, {"ref": ref, "limits": limits}),
                seconds=seconds,
                owner=str(origin),
                timeout_message=f"{origin} has not fetched {names.shown_uri(ref)} within "
                f"{limits.fetch_timeout:g} s; raise media_fetch_timeout",
                deadline=limits.deadline,
            )
        except RequestError:
            raise
        except FAULTS as error:
            raise MediaError(
                f"{origin} failed to fetch {names.shown_uri(ref)}: {error_text(error)}"
            ) from error

    def notify(self, hook: str, **arguments: Any) -> None:
        """Calls every observer of an on_ hook. One that raises is logged and not called again."""
        assert hook.startswith("on_"), hook
        for impl in self._registry.impls(hook):
            observer = (impl.plugin_name, hook)
            if observer in self._muted:
                continue
            try:
                call(impl, arguments)
            except FAULTS as error:
                self._muted.add(observer)
                consequence = f"its {hook} is not called again"
                self._registry.fail(impl.plugin_name, "observe", error, consequence)

    def extend_cli(self, app: Any) -> None:
        """Lets plugins add commands to the typer app; those of a plugin that raises are missing."""
        for impl in self._registry.impls("extend_cli"):
            try:
                call(impl, {"app": app})
            except FAULTS as error:
                self._registry.fail(impl.plugin_name, "extend", error, "its commands are missing")
