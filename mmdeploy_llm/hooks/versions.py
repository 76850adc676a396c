"""API_VERSION, the version of what plugins may import, and whether a plugin fits what is here.

A module of a plugin may say for which version it was written: MMDEPLOY_LLM_API = (1, 0). The policy
is in docs/plugin_reference.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mmdeploy_llm.values.text.display import error_text, shown

if TYPE_CHECKING:
    from packaging.requirements import Requirement

API_VERSION = (1, 2)  # removals and changes, additions; see tests/hooks/test_surface.py
OUR_DISTRIBUTION = "mmdeploy-llm"
WRITTEN_FOR = "MMDEPLOY_LLM_API"  # the name in a plugin's module


def requirement_problems(requires: Iterable[str]) -> tuple[str, ...]:
    """Returns what of a package's requirements the installed version of ours does not fit."""
    # Not at the top: every worker process imports this module, and asks for no requirements.
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        ours = metadata.version(OUR_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ()  # our package runs from a source tree and has no version to compare
    problems = []
    for line in requires:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            problems.append(f"its requirement {line!r} cannot be read: {error_text(error)}")
            continue
        if canonicalize_name(requirement.name) != OUR_DISTRIBUTION or not _applies(requirement):
            continue
        if not requirement.specifier.contains(ours, prereleases=True):
            problems.append(
                f"it requires {line}, but {OUR_DISTRIBUTION} {ours} is installed; install versions "
                "that fit or block it"
            )
    return tuple(problems)


def written_for(plugin: object) -> tuple[int, int] | None:
    """Returns the version of the plugin API that a module says it was written for; None where it
    says none. Raises TypeError or ValueError where that is not two numbers."""
    written = getattr(plugin, WRITTEN_FOR, None)
    if written is None:
        return None
    major, minor = (int(part) for part in written)
    return major, minor


def api_problems(plugin: object) -> tuple[str, ...]:
    """Returns how the version of the plugin API that a plugin was written for does not fit."""
    try:
        version = written_for(plugin)
    except (TypeError, ValueError):
        written = getattr(plugin, WRITTEN_FOR)
        return (f"{WRITTEN_FOR} must be two numbers such as {API_VERSION}, got {shown(written)}",)
    if version is None:
        return ()
    major, minor = version
    about = f"it was written for version {major}.{minor} of the plugin API, and this is "
    about += ".".join(map(str, API_VERSION))
    if (major, minor) > API_VERSION:
        return (f"{about}: install a newer {OUR_DISTRIBUTION}",)
    if major < API_VERSION[0]:
        return (f"{about}, in which names were removed: install a newer version of the plugin",)
    return ()


def _applies(requirement: Requirement) -> bool:
    """Whether the requirement's environment marker holds here when no extra is requested."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})
