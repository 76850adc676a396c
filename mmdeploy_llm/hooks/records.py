"""Records about plugins: where they come from, what they provide, and what went wrong."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from mmdeploy_llm.hooks.objects.attention import AttentionBackendSpec
from mmdeploy_llm.hooks.objects.chat_parts import ChatPartSpec
from mmdeploy_llm.hooks.objects.logits import LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.model_files import ModelFileSpec
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec
from mmdeploy_llm.hooks.objects.weights import WeightFormatSpec

from .contracts import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, ToolParserSpec
from .names import normalise

Phase = Literal["discover", "import", "register", "provide", "observe", "extend"]
NamedSpec = (
    ReasoningParserSpec
    | ToolParserSpec
    | LogitsProcessorSpec
    | ReadingPreset
    | AttentionBackendSpec
    | WeightFormatSpec
)
FactorySpec = (
    ModelSpec
    | ReasoningParserSpec
    | ToolParserSpec
    | LogitsProcessorSpec
    | MediaProcessorSpec
    | AttentionBackendSpec
    | OutputSinkSpec
    | ModelFileSpec
)
Spec = FactorySpec | ReadingPreset | CorpusFormatSpec | ChatPartSpec | WeightFormatSpec
# A plugin may raise these without ending the host. KeyboardInterrupt is the user's and passes.
FAULTS = (Exception, SystemExit)

SpecT = TypeVar(
    "SpecT",
    ModelSpec,
    ReasoningParserSpec,
    ToolParserSpec,
    LogitsProcessorSpec,
    MediaProcessorSpec,
    ReadingPreset,
    CorpusFormatSpec,
    OutputSinkSpec,
    AttentionBackendSpec,
    WeightFormatSpec,
    ModelFileSpec,
    ChatPartSpec,
)
NamedSpecT = TypeVar(
    "NamedSpecT",
    ReasoningParserSpec,
    ToolParserSpec,
    LogitsProcessorSpec,
    ReadingPreset,
    AttentionBackendSpec,
    WeightFormatSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginOrigin:
    """The origin of a plugin. distribution, version: of its package; None when it is not
    installed. is_builtin: it comes with this package. file: of a plugin that is a single file.
    aliases: further names of it."""

    name: str
    module: str
    distribution: str | None = None
    version: str | None = None
    is_builtin: bool = False
    file: Path | None = None
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a caller may mean it, in the form in which they are compared."""
        if self.file is not None:
            return tuple(map(normalise, (self.name, *self.aliases, str(self.file))))
        package = (self.distribution or "").replace(".", "-")
        own = (self.name.rpartition(":")[2], *self.aliases)
        every = (self.name, *own, *(f"{package}:{name}" for name in own))
        return tuple(dict.fromkeys(map(normalise, every)))

    @property
    def standing(self) -> int:
        """The rank of its specs among others of the same priority: a file that this program has
        named comes before what somebody has installed, and that before what is built in."""
        return 2 if self.file is not None else 0 if self.is_builtin else 1

    def __str__(self) -> str:
        """Text for messages, such as: plugin 'acme' (mmdeploy-llm 0.1.0)."""
        package = " ".join(part for part in (self.distribution, self.version) if part)
        return f"plugin {self.name!r} ({package or self.file or 'registered in process'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFailure:
    """One failure of a plugin. error: class and message of the exception, without memory
    addresses."""

    plugin: str
    phase: Phase
    error: str
    distribution: str | None

    def __str__(self) -> str:
        """Text for messages: 'acme' (acme-llm): import: ImportError: No module named 'acme'."""
        package = self.distribution or "registered in process"
        return f"{self.plugin!r} ({package}): {self.phase}: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """One plugin as `mmdeploy-llm plugins` shows it; plugins that could not be loaded are included.

    provides: such as "model acme", "reasoning parser acme", "image processor acme-image",
        "hook on_step".
    warnings: versions that do not fit, a slow import, as sentences.
    """

    name: str
    module: str
    distribution: str | None
    version: str | None
    provides: tuple[str, ...]
    failures: tuple[PluginFailure, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Provided(Generic[SpecT]):
    """A spec and the plugin it came from."""

    spec: SpecT
    origin: PluginOrigin


def describe(spec: Spec) -> str:
    """Names a spec as PluginInfo.provides does."""
    match spec:
        case ModelSpec():
            return f"model {spec.name}"
        case ReasoningParserSpec():
            return f"reasoning parser {spec.name}"
        case ToolParserSpec():
            return f"tool parser {spec.name}"
        case LogitsProcessorSpec():
            return f"logits processor {spec.name}"
        case MediaProcessorSpec():
            return f"{spec.kind} processor {spec.name}"
        case ReadingPreset():
            return f"reading preset {spec.name}"
        case CorpusFormatSpec():
            return f"corpus format {spec.name}"
        case OutputSinkSpec():
            return f"output sink {spec.name}"
        case AttentionBackendSpec():
            return f"attention backend {spec.name}"
        case WeightFormatSpec():
            return f"weight format {spec.name}"
        case ModelFileSpec():
            return f"model file {spec.name}"
        case ChatPartSpec():
            return f"chat part {spec.name}"


def failure_of(origin: PluginOrigin, phase: Phase, error: str) -> PluginFailure:
    """Builds the record of one failure of the plugin from `origin`."""
    place = origin.distribution or (None if origin.file is None else str(origin.file))
    return PluginFailure(plugin=origin.name, phase=phase, error=error, distribution=place)
