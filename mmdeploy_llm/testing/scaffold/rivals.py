"""Says which specs are not used because another plugin serves the same name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mmdeploy_llm.errors import PluginConflictError
from mmdeploy_llm.hooks import (
    ChatPartSpec,
    CorpusFormatSpec,
    MediaProcessorSpec,
    ModelSpec,
    OutputSinkSpec,
    PluginManager,
)
from mmdeploy_llm.hooks.records import Spec, describe
from mmdeploy_llm.hooks.selection import ANY_MODEL

Winner = Callable[[], Spec | None]


def rivals_of(manager: PluginManager, plugin: str) -> tuple[str, ...]:
    """Returns a line for each name that `plugin` provides and another serves: "AcmeForCausalLM is
    served by 'acme'", "AcmeForCausalLM is claimed by several plugins"."""
    own = [spec for spec in manager.specs if manager.owner(spec) == plugin]
    return tuple(dict.fromkeys(line for spec in own for line in _lines(manager, spec)))


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
    if isinstance(spec, ModelSpec):
        for name in spec.architectures:
            if name != ANY_MODEL:
                yield name, partial(manager.model_for, [name])
    elif isinstance(spec, MediaProcessorSpec):
        for family in spec.models:
            if family != ANY_MODEL:
                winner = partial(manager.media_processor, spec.kind, family)
                yield f"the {spec.kind} processor of {family}", winner
    elif isinstance(spec, ChatPartSpec):
        for family in spec.models:
            for name in spec.types:
                yield f"chat part {name}", partial(_writer, manager, name, family)
    elif isinstance(spec, CorpusFormatSpec):
        for name in spec.suffixes:
            yield f"corpus format of {name}", partial(_reader, manager, name)
    elif isinstance(spec, OutputSinkSpec):
        for name in spec.suffixes:
            yield f"output sink of {name}", partial(_store, manager, name)
    else:
        kind, find = _finder(manager, spec)
        for name in (spec.name, *getattr(spec, "aliases", ())):
            yield f"{kind} {name}", partial(find, name)


def _writer(manager: PluginManager, part_type: str, family: str) -> Spec | None:
    """Returns what writes a type of parts for a family."""
    found = manager.kinds.chat_part(part_type, family)
    return None if found is None else found.spec


def _reader(manager: PluginManager, suffix: str) -> Spec | None:
    """Returns the format of corpora that has a suffix."""
    found = manager.kinds.format_of(suffix)
    return None if found is None else found.spec


def _store(manager: PluginManager, suffix: str) -> Spec | None:
    """Returns the format of outputs that has a suffix."""
    found = manager.kinds.output_of(suffix)
    return None if found is None else found.spec


def _finder(manager: PluginManager, spec: Any) -> tuple[str, Callable[[str], Any]]:
    """Returns what a spec with a name is called, and a function that finds such a spec by name."""
    kind = describe(spec).removesuffix(f" {spec.name}")
    return kind, partial(manager.named, type(spec), kind)
