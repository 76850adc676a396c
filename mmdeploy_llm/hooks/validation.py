"""Checks what plugins return: the functions they register and the specs they provide."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pluggy

from mmdeploy_llm.errors import MediaError, PluginContractError
from mmdeploy_llm.hooks.objects.attention import AttentionBackendSpec
from mmdeploy_llm.hooks.objects.chat_parts import ChatPartSpec
from mmdeploy_llm.hooks.objects.logits import LogitsProcessorSpec
from mmdeploy_llm.hooks.objects.model_files import ModelFileSpec
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec
from mmdeploy_llm.hooks.objects.weights import WeightFormatSpec
from mmdeploy_llm.messages import MediaRef

from .contracts import (
    MediaLimits,
    MediaProcessorSpec,
    ModelSpec,
    ReasoningParserSpec,
    ToolParserSpec,
)
from .kinds import claimed
from .names import did_you_mean, error_text, listing, normalise, shown_uri
from .records import PluginOrigin, Spec

PROVIDED: Mapping[str, type[Spec]] = MappingProxyType(
    {
        "provide_models": ModelSpec,
        "provide_reasoning_parsers": ReasoningParserSpec,
        "provide_tool_parsers": ToolParserSpec,
        "provide_logits_processors": LogitsProcessorSpec,
        "provide_media_processors": MediaProcessorSpec,
        "provide_reading_presets": ReadingPreset,
        "provide_corpus_formats": CorpusFormatSpec,
        "provide_output_sinks": OutputSinkSpec,
        "provide_attention_backends": AttentionBackendSpec,
        "provide_weight_formats": WeightFormatSpec,
        "provide_model_files": ModelFileSpec,
        "provide_chat_parts": ChatPartSpec,
    }
)


def check_hooks(plugin: object, manager: pluggy.PluginManager) -> None:
    """Raises PluginContractError with all that is wrong with the hooks of a plugin, which is not
    registered yet.

    Wrappers are refused because they could change what other plugins provide, default values
    because pluggy 1.6 and 1.7 treat them differently.
    """
    hooks = {name: hook for name, hook in vars(manager.hook).items() if name[0] != "_"}
    found = False
    faults: list[str] = []
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            continue
        found, hook = True, options.get("specname") or name
        if hook in hooks:
            documented = hooks[hook].spec.argnames
            faults += _faults(hook, getattr(plugin, name), options, documented)
        elif not options.get("optionalhook"):
            hint = did_you_mean(hook, hooks)
            faults.append(f"there is no hook {hook!r}{hint}; hooks: {listing(hooks)}")
    if not found:
        unmarked = [name for name in hooks if callable(getattr(plugin, name, None))]
        hint = f"mark {listing(unmarked)} with" if unmarked else "mark its functions with"
        faults.append(f"it implements no hook; {hint} @hookimpl from mmdeploy_llm.hooks")
    if faults:
        raise PluginContractError("; ".join(faults))


def _faults(
    hook: str, function: Callable[..., Any], options: Mapping[str, Any], documented: Sequence[str]
) -> Iterator[str]:
    """Yields what is wrong with one implementation. documented: the arguments of the hook."""
    if options.get("wrapper") or options.get("hookwrapper"):
        yield f"{hook} is a hook wrapper; wrappers are not supported, implement the hook itself"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        yield f"{hook} is asynchronous; hooks are called, not awaited: write `def`"
    parameters = inspect.signature(function).parameters.values()
    own = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    unknown = [item.name for item in own if item.name not in documented]
    if unknown:
        takes = ", ".join(documented) or "no arguments"
        yield f"{hook} takes {takes}, yours has {', '.join(unknown)}"
    defaults = [item.name for item in own if item.default is not item.empty]
    if defaults:
        yield f"{hook} has default values for {listing(defaults)}; remove them"
    named = [item.name for item in own if item.kind == item.KEYWORD_ONLY]
    if named:
        yield f"{hook} takes its arguments by position; remove the * before {listing(named)}"


def checked_specs(hook: str, answer: Any) -> tuple[Spec, ...]:
    """Returns the specs of a provide_ hook as a tuple. Raises PluginContractError for anything
    else."""
    wanted = PROVIDED[hook]
    if isinstance(answer, str | wanted) or not isinstance(answer, Iterable):
        raise PluginContractError(
            f"{hook} must return an iterable of {wanted.__name__}, such as a list; "
            f"got {_shown(answer)}"
        )
    specs = tuple(answer)
    faults = [
        f"{hook} must return {wanted.__name__} only; got {_shown(spec)}"
        for spec in specs
        if not isinstance(spec, wanted)
    ]
    faults = faults or [fault for spec in specs for fault in _spec_faults(spec)]
    faults = faults or [*_repeated(hook, specs), *_shared(hook, specs)]
    if faults:
        raise PluginContractError("; ".join(faults))
    return specs


def checked_blob(blob: object, origin: PluginOrigin, ref: MediaRef, limits: MediaLimits) -> bytes:
    """Returns `blob`, which must be bytes and within the limits."""
    if not isinstance(blob, bytes):
        raise MediaError(
            f"{origin} must return bytes or None for {shown_uri(ref)}, got {type(blob).__name__}"
        )
    limits.check_bytes(len(blob), f"{ref.kind} {shown_uri(ref)}")
    return blob


def _spec_faults(spec: Spec) -> Iterator[str]:
    """Yields the fields that break the rules in the docstring of `spec`, in one sentence."""
    from .rules import broken  # with pydantic, which commands that check no spec do not import

    wrong = list(broken(spec, _shown))
    if isinstance(spec, MediaProcessorSpec) and spec.yields == spec.kind:
        wrong.append(f"yields must be another kind than its own, {spec.kind!r}")
    if isinstance(spec, MediaProcessorSpec) and spec.yields is not None and spec.part_text:
        wrong.append("part_text must be None with yields: the parts have their own")
    if isinstance(spec, ChatPartSpec) and not wrong and not spec.has_files:
        wrong.append("files must be among its keys and optional keys")
    if wrong:
        name = (isinstance(spec.name, str) and spec.name.strip()) or "without a name"
        yield f"{type(spec).__name__} {name}: {'; '.join(wrong)}"


def _repeated(hook: str, specs: Iterable[Spec]) -> Iterator[str]:
    """Yields the names that one plugin claims twice, whatever the priorities."""
    seen = Counter(claim for spec in specs for claim in _claims(spec))
    yield from (f"{hook} returns {claim} twice" for claim, count in seen.items() if count > 1)


def _shared(hook: str, specs: Iterable[Spec]) -> Iterator[str]:
    """Yields the suffixes and the like that one plugin gives to two kinds."""
    kinds: dict[tuple[str, Any], str] = {}
    for spec in (spec for spec in specs if isinstance(spec, MediaProcessorSpec)):
        for field, name in claimed(spec):
            kind = kinds.setdefault((field, name), spec.kind)
            if kind != spec.kind:
                yield f"{hook} gives {name!r} in `{field}` to the kinds {kind!r} and {spec.kind!r}"


def _claims(spec: Spec) -> list[str]:
    match spec:
        case ModelSpec():
            return [
                f"model {normalise(spec.name)}",
                *(f"architecture {name}" for name in spec.architectures),
            ]
        case ReasoningParserSpec():
            return [f"reasoning parser {normalise(name)}" for name in (spec.name, *spec.aliases)]
        case ToolParserSpec():
            return [f"tool parser {normalise(name)}" for name in (spec.name, *spec.aliases)]
        case LogitsProcessorSpec():
            return [f"logits processor {normalise(name)}" for name in (spec.name, *spec.aliases)]
        case ReadingPreset():
            return [f"reading preset {normalise(name)}" for name in (spec.name, *spec.aliases)]
        case CorpusFormatSpec():
            name = f"corpus format {normalise(spec.name)}"
            return [name, *map("suffix {}".format, spec.suffixes)]
        case OutputSinkSpec():
            ranked = (f"suffix {own} at priority {spec.priority}" for own in spec.suffixes)
            return [f"output sink {normalise(spec.name)}", *ranked]
        case AttentionBackendSpec():
            return [f"attention backend {normalise(name)}" for name in (spec.name, *spec.aliases)]
        case WeightFormatSpec():
            return [f"weight format {normalise(name)}" for name in (spec.name, *spec.aliases)]
        case ModelFileSpec():
            return [f"model file {normalise(spec.name)}"]
        case ChatPartSpec():
            families = [(type_, normalise(own)) for type_ in spec.types for own in spec.models]
            return [f"chat part {type_!r} for model {own}" for type_, own in families]
        case MediaProcessorSpec():
            return [
                f"the {spec.kind} processor for model {normalise(model)}" for model in spec.models
            ]


def _shown(value: object) -> str:
    """Returns a short repr without memory addresses, with the type."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"(its repr raises {error_text(error)})"
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
