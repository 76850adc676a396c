"""Reads what an author gives to `plugins check`: the fields of the conformance classes, for each
spec and for the fetcher.

The plugin's module says where they are, so that listing plugins does not import them:

    CHECKED_WITH = "acme.checked:FIELDS"  # {"acme-album": {"samples": {"one": b"..."}}}

The name is that of a mapping, or of a function that returns a context manager of one, for what must
be set up and put away.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import Any

from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.names import did_you_mean, listing
from mmdeploy_llm.testing.models.base import Check, attributed, demand
from mmdeploy_llm.testing.plugins.plugin_subject import PluginSubject

from .doors import DOORS, FETCHER, door_of

NAME = "CHECKED_WITH"
FORM = f'{NAME} is "module:name" of a mapping: name of a spec, or {FETCHER} -> fields'
OF_THE_KIT = {"spec", "file", "checkpoint", "fetch", "others"}  # fields that are not given


@dataclass(kw_only=True)
class GivenFields:
    """The fields of a plugin's subjects; {} until the check has read them. stack: closes what they
    need."""

    plugin: PluginSubject
    stack: ExitStack
    by_name: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Any]:
        """Returns the fields for the spec of this name."""
        return dict(self.by_name.get(name, {}))

    def checks(self) -> tuple[Check, ...]:
        """Returns the check of the fields; none for a plugin that gives none."""
        return (given_fields_are_known,) if hasattr(self.plugin.loaded, NAME) else ()


def given_fields_are_known(given: GivenFields) -> None:
    """CHECKED_WITH gives fields that the checks of the plugin's specs have."""
    plugin, named = given.plugin, getattr(given.plugin.loaded, NAME)
    with attributed(f"reading {NAME} = {named!r:.200}", FORM):
        found = imported(named) if isinstance(named, str) else named
        if callable(found):
            found = given.stack.enter_context(found())
    is_nested = isinstance(found, Mapping) and all(isinstance(x, Mapping) for x in found.values())
    demand(is_nested, f"{NAME} gives {found!r:.200}; {FORM}")
    known = {spec.name: _fields_of(spec) for spec in plugin.specs}
    if plugin.has_hook(FETCHER):
        known[FETCHER] = _types(DOORS[FETCHER].subject_class())
    for name, own in found.items():
        demand(
            name in known,
            f"{NAME} has fields for {name!r}{did_you_mean(name, known)}, which the plugin does not "
            f"provide; it provides {listing(known)}",
        )
        allowed = known[name]
        for each, value in own.items():
            demand(
                each in allowed,
                f"{NAME} gives {each!r}{did_you_mean(each, allowed)} for {name!r}, whose checks "
                f"have {listing(sorted(allowed)) or 'no such fields'}",
            )
            demand(
                isinstance(value, Mapping) or not allowed[each].startswith("Mapping"),
                f"{NAME} gives {each!r} for {name!r} as {type(value).__name__}; it is a mapping, "
                f"{{name: {'value' if each != 'samples' else 'bytes, or another source'}}}",
            )
    given.by_name = {name: _with_examples(plugin, name, own) for name, own in found.items()}


def _with_examples(plugin: PluginSubject, name: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields, in which examples that are mappings have become those of the kit: a
    single file may not import it."""
    door = next((door_of(spec) for spec in plugin.specs if spec.name == name), None)
    if door is None or not door.example or "examples" not in own:
        return own
    with attributed(f"reading the examples of {name!r}", f"an example has fields: {door.fields()}"):
        return {**own, "examples": door.examples(own["examples"])}


def _fields_of(spec: Any) -> Mapping[str, str]:
    door = door_of(spec)
    return {} if door is None else _types(door.subject_class())


def _types(subject: Any) -> Mapping[str, str]:
    """Returns the types of the fields that an author gives, as their class says them."""
    own = {each.name: str(each.type) for each in fields(subject) if each.init}
    return {name: kind for name, kind in own.items() if name not in OF_THE_KIT}
