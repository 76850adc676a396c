"""Selects the spec for a name: the highest priority wins, a tie is an error, nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence

from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError, PluginConflictError

from .contracts import MediaProcessorSpec, ModelSpec
from .names import did_you_mean, listing, normalise
from .reading import ReadingPreset
from .records import NamedSpec, NamedSpecT, Provided, SpecT

ANY_MODEL = "*"


def top(candidates: Sequence[Provided[SpecT]], wanted: str) -> SpecT:
    """Returns the spec of highest priority. Raises PluginConflictError when several share it.

    wanted: what the candidates compete for, as a phrase for the message. `candidates` is not empty.
    """
    highest = max(candidate.spec.priority for candidate in candidates)
    best = [candidate for candidate in candidates if candidate.spec.priority == highest]
    if len(best) == 1:
        return best[0].spec
    names = [candidate.origin.name for candidate in best]
    raise PluginConflictError(
        f"{wanted} comes from {' and from '.join(str(item.origin) for item in best)}, all at "
        f"priority {highest}; "
        f"decide with blocked_plugins={names[1:]!r}, or name those to load in `plugins`"
    )


def select_model(
    provided: Sequence[Provided[ModelSpec]], architectures: Sequence[str], note: str
) -> ModelSpec:
    """Returns the spec that names the first possible of `architectures`, else one that serves any.

    note: the end of the error message.
    """
    wanted_names = (*architectures, ANY_MODEL) if architectures else ()
    for architecture in wanted_names:
        candidates = [item for item in provided if architecture in item.spec.architectures]
        if candidates:
            return top(candidates, f"architecture {architecture!r}")
    known = [name for item in provided for name in item.spec.architectures]
    if not architectures:
        found = "the config.json of the model names no architecture"
    else:
        wanted = " or ".join(map(repr, architectures))
        hint = did_you_mean(architectures[0], known)
        found = f"no loaded plugin serves the architecture {wanted}{hint}"
    raise ModelNotSupportedError(
        f"{found}. Supported: {listing(known)}. Use one of these or install a plugin for it{note}"
    )


def select_named(
    provided: Sequence[Provided[NamedSpecT]], kind: str, name: str, note: str
) -> NamedSpecT:
    """Returns the spec of this name or alias, compared normalised. Raises ConfigError without one.

    kind: "reasoning parser" or the like, for messages.
    """
    candidates = [item for item in provided if normalise(name) in map(normalise, _names(item.spec))]
    if candidates:
        return top(candidates, f"{kind} {name!r}")
    known = [each for item in provided for each in _names(item.spec)]
    raise ConfigError(
        f"there is no {kind} {name!r}{did_you_mean(name, known)}. "
        f"Known: {listing(item.spec.name for item in provided)}{note}"
    )


def _names(spec: NamedSpec) -> tuple[str, ...]:
    return (spec.name, *spec.aliases)


def select_processor(
    provided: Sequence[Provided[MediaProcessorSpec]], kind: str, model: str
) -> MediaProcessorSpec | None:
    """Returns the processor of `kind` for the family; one that names it beats one for any model."""
    of_kind = [item for item in provided if item.spec.kind == kind]
    for family in (normalise(model), ANY_MODEL):
        candidates = [item for item in of_kind if family in map(normalise, item.spec.models)]
        if candidates:
            return top(candidates, f"the {kind} processor for model {model!r}")
    return None


def select_preset(
    provided: Sequence[Provided[ReadingPreset]], architecture: str, about: str
) -> ReadingPreset | None:
    """Returns the preset for models of an architecture; one with a mark that `about` has beats one
    without marks."""
    text = about.casefold()
    own = [item for item in provided if architecture in item.spec.architectures]
    marked = [item for item in own if any(mark.casefold() in text for mark in item.spec.marks)]
    candidates = marked or [item for item in own if not item.spec.marks]
    return top(candidates, f"the reading preset for {architecture!r}") if candidates else None
