"""Checks of a plugin as a whole: its module, its hooks and the specs that it lists."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from mmdeploy_llm.errors import MediaError, PluginError
from mmdeploy_llm.hooks import (
    PluginManager,
)
from mmdeploy_llm.hooks.discovery import NAME_TAKEN, discover
from mmdeploy_llm.hooks.names import normalise
from mmdeploy_llm.hooks.records import PluginFailure, PluginOrigin, Spec, describe
from mmdeploy_llm.hooks.selection import use_keys
from mmdeploy_llm.hooks.validation import _claims as claims
from mmdeploy_llm.hooks.versions import api_problems
from mmdeploy_llm.testing.models.base import Check, CheckSkipped, attributed, demand

from .arguments import example_arguments
from .installed import installed
from .plugin_subject import PluginSubject


def imports_in_a_fresh_process(subject: PluginSubject) -> None:
    """The module can be imported and lists what it provides in a fresh process."""
    demand(subject.probe is not None, "unreachable")


def lists_without_torch(subject: PluginSubject) -> str | None:
    """Importing the module and listing what it provides imports neither torch nor transformers; a
    single file may, since it is loaded only where it is named."""
    heavy = subject.probe["by"]
    if subject.file is not None:
        return f"it imports {', '.join(heavy)}: fine in a file, not in a package" if heavy else None
    shown = ", ".join(f"{name} (at {where})" for name, where in heavy.items())
    demand(
        not heavy,
        f"importing {subject.module_name!r} and listing imports {shown}; move the code "
        'that needs it into another module, and name that in the spec\'s factory "module:Class"',
    )
    return None


def imports_quickly(subject: PluginSubject) -> None:
    """Importing the module does no work."""
    seconds, allowed = subject.probe["seconds"], subject.max_import_seconds
    if subject.file is not None:  # which may import torch
        seconds -= subject.probe["heavy_seconds"]
    demand(
        seconds <= allowed,
        f"importing {subject.module_name!r} took {seconds:.1f} s, {allowed:g} s are allowed, most "
        f"of it for {subject.probe['slowest']}; do "
        "nothing at import (no file, no network, no model), move the work into the factory",
    )


def hooks_are_valid(subject: PluginSubject) -> None:
    """Every hook exists, has documented arguments, and provides valid specs."""
    demand(subject.manager.plugins, "unreachable")


def provides_the_same_twice(subject: PluginSubject) -> None:
    """The provide_ hooks return equal specs each time."""
    first = subject.specs
    again = PluginSubject(name=subject.name, module_name=subject.module_name, module=subject.loaded)
    second = again.specs
    demand(
        first == second,
        f"the provide_ hooks returned {_names(first)}, then {_names(second)}; return the same "
        "specs each time, built from constants",
    )


def factories_can_be_imported(subject: PluginSubject) -> None:
    """Every spec's factory, and converter of a preset, exists and can be called."""
    faults = []
    for spec in subject.specs:
        try:
            subject.manager.resolve(spec)
        except PluginError as error:
            faults.append(str(error))
    demand(
        not faults,
        f'{"; ".join(faults)}; correct the spec\'s `factory` ("module:Class"), or the module it '
        "names",
    )


def fits_the_installed_version(subject: PluginSubject) -> None:
    """The plugin's package allows the installed version of mmdeploy-llm, and the plugin was written
    for this version of the plugin API or an older one."""
    found = None if subject.is_loose else installed(subject.name)
    problems = () if found is None else found.problems
    demand(not problems, "; ".join(problems))
    if subject.manager.plugins:  # a module that cannot be imported has been reported
        problems = api_problems(subject.loaded)
        demand(not problems, "; ".join(problems))


def the_name_is_its_own(subject: PluginSubject) -> str | None:
    """No other package has a plugin of the same name: only one of them is loaded by it."""
    found = None if subject.is_loose else installed(subject.name)
    if found is None:
        raise CheckSkipped("the plugin is not installed")
    lost = [each for each in discover().failures if each.error.endswith(NAME_TAKEN)]
    lost = [each for each in lost if normalise(each.plugin) == normalise(found.origin.name)]
    demand(
        not lost,
        f"{found.origin} is checked; the one of {_packages(lost)} has the same name, and is not "
        "loaded: give its entry point another name",
    )
    for other in discover().plugins:
        if other.origin != found.origin and normalise(subject.name) in other.origin.names:
            return f"{found.origin} is checked; {other.full_name} names the other of this name"
    return None


def names_are_unique(subject: PluginSubject) -> str | None:
    """No other package claims the same name or architecture at the same priority; a built-in plugin
    may: what somebody has installed comes first."""
    found = None if subject.is_loose else installed(subject.name)
    own = 2 if subject.file is not None else 1 if found is None else found.origin.standing
    taken: dict[tuple[str, int], PluginOrigin] = {}
    others = PluginManager.load(files=subject.beside)
    for spec in others.specs:
        origin = others.origin(spec)
        if origin.module not in (subject.module_name, str(subject.file)):
            taken |= dict.fromkeys(((each, spec.priority) for each in claims(spec)), origin)
    notes, ties = [], []
    claimed = [(spec, claim) for spec in subject.specs for claim in claims(spec)]
    for spec, claim in claimed:
        owner = taken.get((claim, spec.priority))
        if owner is None:
            continue
        if owner.standing == own:
            ties.append(
                f"{describe(spec)} claims {claim} at priority {spec.priority}, as the installed "
                f"plugin {owner.name!r} does"
            )
            continue
        pair = [subject.name, owner.name]
        first, second = pair if own > owner.standing else pair[::-1]
        notes.append(f"{claim} is served by {first!r}, not by {second!r}")
    demand(
        not ties,
        f"{'; '.join(ties)}, so the choice is ambiguous; rename it, or set another `priority` (the "
        "highest wins)",
    )
    if not notes:
        return None
    key = next(iter(use_keys(subject.specs[0])))
    return f"{'; '.join(notes)}: use={{{key!r}: ...}} (--use) and blocked_plugins choose otherwise"


def hooks_take_what_is_documented(subject: PluginSubject) -> None:
    """Observers, fetchers and CLI extensions accept the documented arguments and do not raise."""
    checked = False
    for hook, arguments in example_arguments().items():
        if not subject.has_hook(hook):
            continue
        checked = True
        function = getattr(subject.loaded, hook)
        given = {name: arguments[name] for name in inspect.signature(function).parameters}
        with attributed(f"{hook}({', '.join(given)})", "let the hook accept any valid argument"):
            try:
                answer = function(**given)
            except MediaError:
                continue
        is_bytes = hook == "fetch_media" and isinstance(answer, bytes)
        demand(
            answer is None or is_bytes,
            f"{hook} returns a {type(answer).__name__}; "
            + ("return bytes, or None to pass" if hook == "fetch_media" else "return nothing"),
        )
    if not checked:
        raise CheckSkipped("the plugin only provides specs")


CHECKS: tuple[Check, ...] = (
    imports_in_a_fresh_process,
    lists_without_torch,
    imports_quickly,
    hooks_are_valid,
    provides_the_same_twice,
    factories_can_be_imported,
    fits_the_installed_version,
    the_name_is_its_own,
    names_are_unique,
    hooks_take_what_is_documented,
)


def _names(specs: Sequence[Spec]) -> str:
    return ", ".join(map(describe, specs)) or "nothing"


def _packages(failures: Sequence[PluginFailure]) -> str:
    return " and ".join(str(failure.distribution) for failure in failures)
