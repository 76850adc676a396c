"""Says which specs are not used because another plugin serves the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mmdeploy_llm.errors import PluginConflictError

from .contracts import MediaProcessorSpec, ModelSpec, ReasoningParserSpec, ToolParserSpec
from .manager import PluginManager
from .records import Spec
from .selection import ANY_MODEL, use_keys

Winner = Callable[[], Spec | None]


def rivals_of(manager: PluginManager, plugin: str) -> tuple[str, ...]:
    """Returns a line for each name that `plugin` provides and another serves: "AcmeForCausalLM is
    served by 'acme'", "AcmeForCausalLM is claimed by several plugins"."""
    specs: tuple[Spec, ...] = (
        *manager.models,
        *manager.reasoning_parsers,
        *manager.tool_parsers,
        *manager.logits_processors,
        *manager.media_processors,
    )
    lines = [
        line for spec in specs if manager.owner(spec) == plugin for line in _lines(manager, spec)
    ]
    return tuple(dict.fromkeys(lines))


def _lines(manager: PluginManager, spec: Spec) -> Iterator[str]:
    for name, winner in _claims(manager, spec):
        try:
            found = winner()
        except PluginConflictError:
            yield f"{name} is claimed by several plugins"
            continue
        if found is not None and manager.owner(found) != manager.owner(spec):
            yield f"{name} is served by {manager.owner(found)!r}"


def _claims(manager: PluginManager, spec: Spec) -> Iterator[tuple[str, Winner]]:
    """Yields each name that a spec claims, and a function that returns the spec which has it."""
    match spec:
        case ModelSpec():
            for name in spec.architectures:
                if name != ANY_MODEL:
                    yield name, lambda name=name: manager.model_for([name])  # type: ignore[misc]
        case MediaProcessorSpec():
            for family in spec.models:
                if family != ANY_MODEL:
                    yield (
                        f"the {spec.kind} processor of {family}",
                        lambda family=family: manager.media_processor(spec.kind, family),  # type: ignore[misc]
                    )
        case ReasoningParserSpec():
            for name in use_keys(spec):
                yield (
                    f"reasoning parser {name}",
                    lambda name=name: manager.reasoning_parser(name),  # type: ignore[misc]
                )
        case ToolParserSpec():
            for name in use_keys(spec):
                yield f"tool parser {name}", lambda name=name: manager.tool_parser(name)  # type: ignore[misc]
        case _:
            for name in use_keys(spec):
                yield (
                    f"logits processor {name}",
                    lambda name=name: manager.logits_processor(name),  # type: ignore[misc]
                )
