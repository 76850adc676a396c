"""Finds JSON schemas that no finite JSON fulfils because they require themselves.

llguidance refuses most schemas without a value (minLength above maxLength, enums that contradict
each other), but it follows `$ref`s lazily and would generate text for one of these until
max_tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from mmdeploy_llm.errors import RequestError

MAX_WORK = 200_000  # schemas that are looked at, about 0.2 s


def check_schema(name: str, schema: Any) -> None:
    """Raises RequestError for what is no schema, and for one that can never be fulfilled."""
    if schema is not True and not isinstance(schema, dict):
        found = "false, which nothing fulfils" if schema is False else type(schema).__name__
        raise RequestError(f"{name} must be a JSON object, found {found}")
    if schema is not True and not _is_finite(schema):
        raise RequestError(
            f"{name} can never be fulfilled: it requires itself, so that the JSON "
            "would never end; make a property optional or allow an empty list"
        )


def _is_finite(root: dict[str, Any]) -> bool:
    """Computes the least fixpoint over the targets of `$ref`s: those that some finite JSON may
    fulfil. What cannot be decided here counts as finite."""
    search = _Search(root)
    order = list(search.targets)
    is_fresh = True
    while is_fresh and search.num_left > 0:
        is_fresh = False
        order.reverse()  # chains of references may go either way
        for pointer in order:
            if pointer not in search.finite and search.may_end(search.targets[pointer]):
                search.finite.add(pointer)
                is_fresh = True
    return search.may_end(root)


class _Search:
    """The state of `_is_finite`. finite: references known to have a finite value."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.targets = dict(_targets(root))
        self.finite: set[str] = set()
        self.num_left = MAX_WORK

    def _is_open(self, reference: str) -> bool:
        return reference in self.targets and reference not in self.finite

    def may_end(self, schema: Any) -> bool:
        """Whether a finite JSON may fulfil a schema, when only references in `finite` have one."""
        self.num_left -= 1
        if not isinstance(schema, dict) or self.num_left <= 0:
            return schema is not False
        reference = schema.get("$ref")
        if isinstance(reference, str) and self._is_open(reference):
            return False
        for name in ("anyOf", "oneOf"):
            options = _list(schema.get(name))
            if options and not any(map(self.may_end, options)):
                return False
        return all(map(self.may_end, (*_list(schema.get("allOf")), *_required(schema))))


def _required(schema: dict[str, Any]) -> Iterator[Any]:
    """Yields the schemas of all values that JSON must contain when it fulfils `schema`."""
    if schema.get("type") == "object":
        properties = schema.get("properties")
        for name in _list(schema.get("required")):
            if isinstance(name, str) and isinstance(properties, dict) and name in properties:
                yield properties[name]
    count = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(count, int) and count > 0:
        prefix = _list(schema.get("prefixItems"))
        yield from prefix[:count]
        if count > len(prefix) and "items" in schema:
            yield schema["items"]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _targets(root: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yields each local reference of a schema and what it refers to."""
    for node in _nodes(root):
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield reference, _lookup(root, reference[1:])


def _nodes(root: Any) -> Iterator[dict[str, Any]]:
    """Yields all objects in a schema."""
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _lookup(root: Any, pointer: str) -> Any:
    """Returns the value at a JSON pointer or with an anchor; True, which allows everything, for one
    that is not there: llguidance reports it."""
    if pointer and not pointer.startswith("/"):
        return next((one for one in _nodes(root) if one.get("$anchor") == pointer), True)
    node = root
    for part in unquote(pointer).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name[:9]) < len(node):
            node = node[int(name[:9])]
        else:
            return True
    return node


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
