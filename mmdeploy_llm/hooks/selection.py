"""Selects the spec for a name. Of several the one whose plugin the caller has named in `use` is
taken, else that of the highest priority; at equal priority what somebody has added comes before
what is built in. A tie is an error, nothing is guessed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmdeploy_llm.errors import ConfigError, ModelNotSupportedError, PluginConflictError
from mmdeploy_llm.hooks.objects.chat_parts import ChatPartSpec
from mmdeploy_llm.hooks.objects.model_files import ModelFileSpec
from mmdeploy_llm.hooks.objects.reading import ReadingPreset
from mmdeploy_llm.hooks.objects.relatives import relatives
from mmdeploy_llm.hooks.objects.store import CorpusFormatSpec, OutputSinkSpec

from .contracts import MediaProcessorSpec, ModelSpec
from .names import did_you_mean, listing, normalise
from .records import NamedSpec, NamedSpecT, PluginOrigin, Provided, Spec, SpecT

ANY_MODEL = "*"

logger = logging.getLogger(__name__)


class Chooser:
    """Chooses among the specs that compete for a name, and logs each choice that may surprise,
    once. Only its own methods change it.

    use: name of an architecture, parser, logits processor or kind of media -> name of the plugin
    that serves it.
    """

    def __init__(self, use: Mapping[str, str]) -> None:
        self._use = {normalise(key): normalise(plugin) for key, plugin in use.items()}
        self._told: dict[str, str] = {}
        self._told_refusals: dict[tuple[str, str], str] = {}  # name, what was said -> who serves it
        self.refusals: dict[str, str] = {}  # name of a model -> who refused what it runs

    @property
    def told(self) -> Mapping[str, str]:
        """The choices so far that were logged: what another process need not log again."""
        return {**self._told, **{key: name for (key, _), name in self._told_refusals.items()}}

    def is_chosen(self, key: str, origin: PluginOrigin) -> bool:
        """Whether `use` names this plugin for the key."""
        wanted = self._use.get(normalise(key))
        return wanted is not None and wanted in origin.names

    def top(
        self,
        candidates: Sequence[Provided[SpecT]],
        wanted: str,
        key: str,
        server: PluginOrigin | None = None,
    ) -> Provided[SpecT]:
        """Returns the candidate that is used. Raises PluginConflictError for a tie.

        wanted: what they compete for, as a phrase for messages. key: under which `use` may decide.
        server: of the model, whose own choices are no surprise. `candidates` is not empty.
        """
        chosen = [item for item in candidates if self.is_chosen(key, item.origin)]
        found = chosen or candidates
        best = _highest(found)
        if len(best) > 1:
            raise PluginConflictError(_tie(best, wanted, key))
        if not chosen and len(candidates) > 1:
            self._tell(best[0], candidates, wanted, key, server)
        return best[0]

    def _tell(
        self,
        winner: Provided[SpecT],
        candidates: Sequence[Provided[SpecT]],
        wanted: str,
        key: str,
        server: PluginOrigin | None,
    ) -> None:
        """Logs who serves what several could: as a warning where no priority says so."""
        if key in self._told or winner.origin == server:
            return
        self._told[key] = winner.origin.name
        others = [item for item in candidates if item is not winner]
        same = [item for item in others if item.spec.priority == winner.spec.priority]
        why = "added by you" if same else f"priority {winner.spec.priority}"
        rivals = " and ".join(str(item.origin) for item in same or others)
        other, own = (same or others)[0].origin.name, winner.origin.name
        logger.log(
            logging.WARNING if same else logging.INFO,
            f"{wanted} comes from {winner.origin}, {why}, not from {rivals}; "
            f"to choose: use={{{key!r}: {other!r}}} or {{{key!r}: {own!r}}} (--use {key}={other}), "
            f"blocked_plugins=({own!r},)",
        )

    def tell_refusals(self, key: str, winner: Provided[ModelSpec], refusals: Sequence[str]) -> None:
        """Warns once that a plugin runs what others refuse, if any does."""
        said = "; ".join(refusals)
        self.refusals[winner.spec.name] = f"; {said}" if said else ""
        if said and (key, said) not in self._told_refusals:
            self._told_refusals[key, said] = winner.origin.name
            logger.warning("architecture %r comes from %s: %s", key, winner.origin, said)

    def tell_unused(self, architectures: Sequence[str], provided: Sequence[Provided[Any]]) -> None:
        """Warns of names in `use` that could only be the model's architecture, and are not."""
        if not self._use:
            return
        keys = {normalise(key) for item in provided for key in use_keys(item.spec)}
        known = {normalise(name) for name in architectures}
        others = {
            normalise(key)
            for item in provided
            if not isinstance(item.spec, ModelSpec)
            for key in use_keys(item.spec)
        }
        for key in self._use.keys() - known - others:
            hint = "" if key in keys else did_you_mean(key, architectures)
            logger.warning(
                "use names %r, which has no effect: the model's architecture is %s%s",
                key,
                listing(architectures),
                hint,
            )


def _highest(candidates: Sequence[Provided[SpecT]]) -> list[Provided[SpecT]]:
    """Returns the candidates of the highest priority, and of these those of the best standing."""

    def rank(item: Provided[SpecT]) -> tuple[int, int]:
        return item.spec.priority, item.origin.standing

    highest = max(map(rank, candidates))
    return [item for item in candidates if rank(item) == highest]


def _tie(best: Sequence[Provided[SpecT]], wanted: str, key: str) -> str:
    names = [candidate.origin.name for candidate in best]
    return (
        f"{wanted} comes from {' and from '.join(str(item.origin) for item in best)}, all at "
        f"priority {best[0].spec.priority}; decide with use={{{key!r}: {names[0]!r}}} (--use "
        f"{key}={names[0]}) or blocked_plugins={names[1:]!r}, or name those to load in `plugins`"
    )


Ask = Callable[[Provided[ModelSpec]], str | None]


def select_model(
    provided: Sequence[Provided[ModelSpec]],
    architectures: Sequence[str],
    note: str,
    chooser: Chooser,
    ask: Ask = lambda item: None,
) -> ModelSpec:
    """Returns the spec that names the first possible of `architectures`, else one of the same
    decoder with another head, else one that serves any.

    note: the end of the error message. ask: why a spec refuses the config; None: it takes it.
    """
    refusals: list[str] = []
    for architecture in architectures:
        named = [
            item
            for item in provided
            if chooser.is_chosen(architecture, item.origin)
            and {architecture, ANY_MODEL} & set(item.spec.architectures)
        ]
        exact = [item for item in named if architecture in item.spec.architectures]
        if named:
            # It is not asked: its factory raises for what it does not compute.
            taken = chooser.top(exact or named, f"architecture {architecture!r}", architecture)
            chooser.tell_refusals(architecture, taken, refusals)
            return taken.spec
    others = [other for name in architectures for other in relatives(name)]
    wanted_names = (*architectures, *others, ANY_MODEL) if architectures else ()
    for architecture in wanted_names:
        serving = [item for item in provided if architecture in item.spec.architectures]
        candidates = _taking(serving, ask, refusals)
        if candidates:
            key = architectures[0] if architecture == ANY_MODEL else architecture
            taken = chooser.top(candidates, f"architecture {key!r}", key)
            chooser.tell_refusals(key, taken, refusals)
            return taken.spec
    known = [name for item in provided for name in item.spec.architectures]
    if not architectures:
        found = "the config.json of the model names no architecture"
    else:
        wanted = " or ".join(map(repr, architectures))
        hint = did_you_mean(architectures[0], known)
        found = f"no loaded plugin serves the architecture {wanted}{hint}"
        if refusals:
            found = f"no loaded plugin takes this model of the architecture {wanted}: "
            found += "; ".join(refusals)
    raise ModelNotSupportedError(
        f"{found}. Supported: {listing(known)}. Use one of these or install a plugin for it{note}"
    )


def _taking(
    candidates: Sequence[Provided[ModelSpec]], ask: Ask, refusals: list[str]
) -> Sequence[Provided[ModelSpec]]:
    """Returns the candidates without those of the highest rank that refuse the config, which are
    added to `refusals`. Those below one that takes it are not asked."""
    while candidates:
        reasons = [(item, ask(item)) for item in _highest(candidates)]
        refusing = [item for item, reason in reasons if reason]
        if not refusing:
            break
        refusals += [f"{item.origin} refuses it: {reason}" for item, reason in reasons if reason]
        candidates = [item for item in candidates if item not in refusing]
    return candidates


def select_named(
    provided: Sequence[Provided[NamedSpecT]], kind: str, name: str, note: str, chooser: Chooser
) -> NamedSpecT:
    """Returns the spec of this name or alias, compared normalised. Raises ConfigError without one.

    kind: "reasoning parser" or the like, for messages.
    """
    candidates = [item for item in provided if normalise(name) in map(normalise, _names(item.spec))]
    if candidates:
        return chooser.top(candidates, f"{kind} {name!r}", name).spec
    known = [each for item in provided for each in _names(item.spec)]
    raise ConfigError(
        f"there is no {kind} {name!r}{did_you_mean(name, known)}. "
        f"Known: {listing(item.spec.name for item in provided)}{note}"
    )


def _names(spec: NamedSpec | ModelFileSpec) -> tuple[str, ...]:
    return (spec.name, *getattr(spec, "aliases", ()))


def select_processor(
    provided: Sequence[Provided[MediaProcessorSpec]],
    kind: str,
    model: str,
    chooser: Chooser,
    server: Provided[ModelSpec] | None = None,
) -> MediaProcessorSpec | None:
    """Returns the processor of `kind` for the family; one that names it beats one for any model.

    server: the model's spec. Where `use` names its plugin for the architecture, its own processors
    are meant too, for a model may not understand another's tensors.
    """
    of_kind = [item for item in provided if item.spec.kind == kind]
    origin = None if server is None else server.origin
    is_used = server is not None and any(
        chooser.is_chosen(name, server.origin) for name in server.spec.architectures
    )
    for family in (normalise(model), ANY_MODEL):
        found = [item for item in of_kind if family in map(normalise, item.spec.models)]
        if server is not None and not any(chooser.is_chosen(kind, item.origin) for item in found):
            is_used = any(
                chooser.is_chosen(name, server.origin) for name in server.spec.architectures
            )
            own = [item for item in found if item.origin == server.origin]
            found = own if is_used and own else found
        if found:
            wanted = f"the {kind} processor for model {model!r}"
            return chooser.top(found, wanted, kind, origin).spec
    return None


def select_preset(
    provided: Sequence[Provided[ReadingPreset]], architecture: str, about: str, chooser: Chooser
) -> ReadingPreset | None:
    """Returns the preset for models of an architecture; one with a mark that `about` has beats one
    without marks."""
    text = about.casefold()
    own = [item for item in provided if architecture in item.spec.architectures]
    marked = [item for item in own if any(mark.casefold() in text for mark in item.spec.marks)]
    candidates = marked or [item for item in own if not item.spec.marks]
    if not candidates:
        return None
    return chooser.top(candidates, f"the reading preset for {architecture!r}", architecture).spec


def check_use(use: Mapping[str, str], provided: Sequence[Provided[Any]], note: str) -> None:
    """Raises ConfigError for a plugin in `use` that is not loaded or does not provide the name.

    note: says which plugins are loaded, blocked or failed, for the end of the message.
    """
    for key, plugin in use.items():
        named = [item for item in provided if normalise(plugin) in item.origin.names]
        about = f"use={{{key!r}: {plugin!r}}}"
        if not named:
            known = [item.origin.name for item in provided]
            raise ConfigError(
                f"{about}: no loaded plugin is named {plugin!r} and provides anything"
                f"{did_you_mean(plugin, known)}{note}"
            )
        keys = [name for item in named for name in use_keys(item.spec)]
        if ANY_MODEL not in keys and normalise(key) not in map(normalise, keys):
            everywhere = [name for item in provided for name in use_keys(item.spec)]
            hint = did_you_mean(key, keys) or did_you_mean(key, everywhere)
            raise ConfigError(
                f"{about}: {named[0].origin} does not provide {key!r}{hint}. It provides: "
                f"{listing(keys)}"
            )


def use_keys(spec: Spec) -> tuple[str, ...]:
    """Returns the names under which `use` may choose the plugin of a spec."""
    match spec:
        case ModelSpec():
            return spec.architectures
        case MediaProcessorSpec():
            return (spec.kind,)
        case ReadingPreset():
            return (*_names(spec), *spec.architectures)
        case CorpusFormatSpec() | OutputSinkSpec():
            return (spec.name, *spec.suffixes)
        case ModelFileSpec():
            return (spec.name, *spec.file_names)
        case ChatPartSpec():
            return (spec.name, *spec.types)
        case _:
            return _names(spec)
