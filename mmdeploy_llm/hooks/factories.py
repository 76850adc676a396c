"""Builds the object that a spec describes: imports the factory, calls it, checks the result."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from mmdeploy_llm.errors import (
    MMDeployLLMError,
    ModelNotSupportedError,
    PluginContractError,
    PluginError,
)
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, AttentionBackendSpec
from mmdeploy_llm.hooks.objects.logits import LogitsProcessor, LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.model_files import ModelFile, ModelFileSpec
from mmdeploy_llm.hooks.objects.parsing import ReasoningParser, ToolParser
from mmdeploy_llm.hooks.objects.reading import KEEP, ReadingPreset
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec, RecordStore

from .contracts import (
    MediaProcessor,
    MediaProcessorSpec,
    ModelSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)
from .names import error_text, listing
from .records import FAULTS, FactorySpec, PluginOrigin, Provided, Spec, describe
from .splitting import MediaSplitter

MODEL_METHODS = ("forward", "logits", "positions", "weight_targets")
MODEL_SIZES = ("num_layers", "num_kv_heads", "head_dim", "hidden_size")


def resolve(spec: Spec, origin: PluginOrigin) -> Callable[..., Any]:
    """Imports what `spec.factory` names, of a preset what converts answers, of a format what reads
    its files. Raises PluginError when it cannot be imported or called."""
    match spec:
        case ReadingPreset():
            role, name = "converter", spec.convert or KEEP
        case CorpusFormatSpec():
            role, name = "reader", spec.reader
        case _:
            role, name = "factory", spec.factory
    about = f"{origin}: {name}, the {role} of {describe(spec)},"
    if origin.file is not None and name.partition(":")[0] == origin.file.stem:
        about += " which a file names with its __name__,"  # such as f"{__name__}:Parser"
    found = imported_for(name, about)
    if not callable(found):
        raise PluginContractError(
            f"{about} must be a class or a function, got {type(found).__name__}"
        )
    return found  # type: ignore[no-any-return]


def refusal(config: Any, item: Provided[ModelSpec]) -> str | None:
    """Returns why a model's plugin refuses its config; None where it takes it. Errors of this
    package pass through, any other becomes a PluginError that names the plugin."""
    spec, origin = item.spec, item.origin
    if spec.refuses is None or config is None:
        return None
    about = f"{origin}: {spec.refuses}, which says what {describe(spec)} refuses,"
    ask = imported_for(spec.refuses, about)
    try:
        reason = ask(config)
    except MMDeployLLMError:
        raise
    except FAULTS as error:
        raise PluginError(f"{about} failed: {error_text(error)}") from error
    if reason is not None and not (isinstance(reason, str) and reason):
        raise PluginContractError(f"{about} must return a text or None, got {reason!r}")
    return reason


def imported_for(name: str, about: str) -> Any:
    """Imports what a spec names. about: begins the message of the PluginError if it cannot be."""
    try:
        return imported(name)
    except FAULTS as error:
        raise PluginError(f"{about} cannot be imported: {error_text(error)}") from error


def imported(name: str) -> Any:
    """Imports what a spec names as "module:Attribute"."""
    module, _, attributes = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    return found


def build(spec: FactorySpec, origin: PluginOrigin, args: tuple[Any, ...], note: str = "") -> Any:
    """Returns `factory(*args)`, checked against its contract.

    Errors of this package pass through. Any other becomes an error that names the plugin: a
    ModelNotSupportedError for a model, whose constructor fails on most odd configs, else a
    PluginError. note: the end of an error about a model.
    """
    factory = resolve(spec, origin)
    try:
        built = factory(*args)
    except ModelNotSupportedError as error:
        if not note:
            raise
        raise ModelNotSupportedError(f"{error}{note}") from error
    except MMDeployLLMError:
        raise
    except FAULTS as error:
        is_model = isinstance(spec, ModelSpec) and isinstance(error, Exception)
        kind = ModelNotSupportedError if is_model else PluginError
        about = f"{origin}: building {describe(spec)} with {spec.factory} failed"
        raise kind(f"{about}: {error_text(error)}{note}") from error
    problem = _problem(spec, built)
    if problem:
        raise PluginContractError(
            f"{origin}: the object that {spec.factory} built for {describe(spec)} {problem}"
        )
    return built


def _problem(spec: FactorySpec, built: object) -> str | None:
    """Says how `built` breaks the contract; None when it keeps it."""
    match spec:
        case ModelSpec():
            return _model_problem(spec, built)
        case ReasoningParserSpec():
            return _class_problem(built, ReasoningParser)
        case ToolParserSpec():
            return _class_problem(built, ToolParser)
        case LogitsProcessorSpec():
            return _class_problem(built, LogitsProcessor)
        case OutputSinkSpec():
            return _class_problem(built, RecordStore)
        case ModelFileSpec():
            return _class_problem(built, ModelFile)
        case AttentionBackendSpec():
            return _class_problem(built, AttentionBackend) or _backend_problem(spec, built)
        case MediaProcessorSpec(yields=str()):
            return _class_problem(built, MediaSplitter) or _marker_problem(spec, built)
        case MediaProcessorSpec():
            return _class_problem(built, MediaProcessor) or _processor_problem(spec, built)


def _class_problem(built: object, wanted: type) -> str | None:
    if isinstance(built, wanted):
        return None
    return f"must be a {wanted.__name__} from mmdeploy_llm.hooks, got {type(built).__name__}"


def _backend_problem(spec: AttentionBackendSpec, built: Any) -> str | None:
    name = getattr(built, "name", None)
    return None if name == spec.name else f"has name {name!r}, but its spec says {spec.name!r}"


def _model_problem(spec: ModelSpec, built: object) -> str | None:
    missing = missing_parts(spec, built)
    return f"({type(built).__name__}) lacks {listing(missing)}" if missing else None


def missing_parts(spec: ModelSpec, built: object) -> list[str]:
    """Returns the methods and sizes of a Model that `built` lacks; logits only if it generates."""
    methods = [*MODEL_METHODS, *(["encode_media"] if spec.media else [])]
    if getattr(built, "is_embedder", False):
        methods.remove("logits")
    missing = [name for name in methods if not callable(getattr(built, name, None))]
    sizes = [name for name in MODEL_SIZES if not isinstance(getattr(built, name, None), int)]
    return missing + sizes


def _processor_problem(spec: MediaProcessorSpec, built: Any) -> str | None:
    token = getattr(built, "token", None)
    if not isinstance(token, str) or not token:
        return f"must have a `token` text that is not empty, got {token!r}"
    return _marker_problem(spec, built)


def _marker_problem(spec: MediaProcessorSpec, built: Any) -> str | None:
    kind, markers = getattr(built, "kind", None), getattr(built, "markers", None)
    if kind != spec.kind:
        return f"has kind {kind!r}, but its spec says {spec.kind!r}"
    if not isinstance(markers, tuple) or not all(
        isinstance(marker, str) and marker for marker in markers
    ):
        return f"must have `markers`, a tuple of texts that are not empty, got {markers!r}"
    return None
