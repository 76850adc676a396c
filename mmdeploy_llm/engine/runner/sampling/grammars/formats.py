"""Reads the `format`s of JSON schemas: those that llguidance enforces, those that another one
implies, and all others, which are notes, as the standard says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ENFORCED = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
# What pydantic writes, enforced as what it is a case of.
IMPLIED = {f"uuid{version}": "uuid" for version in range(1, 9)}
# Keywords whose values are data, and those whose values are schemas by name.
DATA = frozenset({"const", "default", "enum", "example", "examples"})
BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def without_notes(schema: Any) -> tuple[Any, frozenset[str]]:
    """Returns a schema with the formats that can be enforced, and those that were left out."""
    notes: set[str] = set()
    return _copied(schema, notes), frozenset(notes)


def _copied(node: Any, notes: set[str], *, is_names: bool = False) -> Any:
    if isinstance(node, list):
        return [_copied(item, notes) for item in node]
    if not isinstance(node, dict):
        return node
    return dict(_items(node, notes, is_names=is_names))


def _items(node: dict[str, Any], notes: set[str], *, is_names: bool) -> Iterable[tuple[str, Any]]:
    for key, value in node.items():
        if is_names:
            yield key, _copied(value, notes)
        elif key == "format" and isinstance(value, str):
            found = IMPLIED.get(value, value)
            if found in ENFORCED:
                yield key, found
            else:
                notes.add(value)
        elif key in DATA:
            yield key, value
        else:
            yield key, _copied(value, notes, is_names=key in BY_NAME)
