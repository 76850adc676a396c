"""Reads what a spec names for its checks: `samples="module:name"`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.model_checks.base import attributed, demand

HOW = 'name a dict, as "module:name", of attributes of the kit\'s class'


def samples_of(name: str | None) -> dict[str, Any]:
    """Returns the dict that a spec names, {} for None. Raises CheckFailed for anything else."""
    if name is None:
        return {}
    with attributed(f"importing the samples {name!r}", HOW):
        found = imported(name)
    demand(isinstance(found, Mapping), f"the samples {name!r} are a {type(found).__name__}; {HOW}")
    return dict(found)
