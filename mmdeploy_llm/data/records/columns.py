"""The columns that records bring to a table besides the fields that every record has: answers by
name, the carried columns of the input, and fields that only some runs write, each with a kind.

A kind widens as values come: nothing < bool | int < float | text | list | struct, and values that
have no kind in common are text. A table that was begun with a narrow kind is written again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SOURCES = ("answers", "columns")  # the fields of a record whose entries become columns
PREFIXES = {"answers": "answer", "columns": "column", "": "record"}
MAX_COLUMNS = 500
MAX_FIELDS = 100  # of one object; one with more is a text
MAX_DEPTH = 6
MAX_INT = 2**63
MAX_EXACT = 2**53  # integers beyond it are no exact doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The kind of a column's values. name: "none", "bool", "int", "float", "text", "list" or
    "struct"; "json", which no value has by itself, is any value as a text of JSON. item: of the
    values of a list. fields: of a struct, by name."""

    name: str
    item: Kind | None = None
    fields: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether any value has said what it is."""
        return self.name != "none"

    def to_json(self) -> Any:
        """Returns the kind as JSON values."""
        if self.item is not None:
            return [self.item.to_json()]
        if self.name == "struct":
            return {name: own.to_json() for name, own in self.fields.items()}
        return self.name

    @classmethod
    def from_json(cls, value: Any) -> Kind:
        """Returns the kind that `to_json` has described. Raises ValueError for anything else."""
        if isinstance(value, list) and len(value) == 1:
            return cls(name="list", item=cls.from_json(value[0]))
        if isinstance(value, dict):
            return cls(name="struct", fields={n: cls.from_json(own) for n, own in value.items()})
        if value not in ("none", "bool", "int", "float", "text"):
            raise ValueError(f"{str(value)[:40]!r} is no kind of a column")
        return cls(name=value)


NONE, TEXT = Kind(name="none"), Kind(name="text")


def kind_of(value: Any, depth: int = 0) -> Kind:
    """Returns the kind of a JSON value; an object without fields says nothing."""
    if value is None or value == {}:
        return NONE
    if isinstance(value, bool):
        return Kind(name="bool")
    if isinstance(value, int):
        return Kind(name="int") if -MAX_INT <= value < MAX_INT else TEXT
    if isinstance(value, float):
        return Kind(name="float")
    if isinstance(value, (list, tuple)) and depth < MAX_DEPTH:
        item = NONE
        for own in value:
            item = widened(item, kind_of(own, depth + 1))
        return Kind(name="list", item=item)
    is_struct = isinstance(value, Mapping) and 0 < len(value) <= MAX_FIELDS and depth < MAX_DEPTH
    if is_struct and all(isinstance(name, str) for name in value):
        return Kind(
            name="struct", fields={name: kind_of(own, depth + 1) for name, own in value.items()}
        )
    return TEXT


def widened(first: Kind, second: Kind) -> Kind:
    """Returns the narrowest kind that holds the values of both."""
    if first == second or not second.is_known:
        return first
    if not first.is_known:
        return second
    if first.name == second.name == "list":
        assert first.item is not None
        assert second.item is not None
        return Kind(name="list", item=widened(first.item, second.item))
    if first.name == second.name == "struct":
        names = dict.fromkeys((*first.fields, *second.fields))
        if len(names) > MAX_FIELDS:
            return TEXT
        both = {n: widened(first.fields.get(n, NONE), second.fields.get(n, NONE)) for n in names}
        return Kind(name="struct", fields=both)
    return Kind(name="float") if {first.name, second.name} == {"int", "float"} else TEXT


def fitted(value: Any, kind: Kind) -> Any:
    """Returns a value as a column of this kind holds it: fields that it lacks are None."""
    if value is None or not kind.is_known:
        return None
    if kind.name == "json":
        return json.dumps(value, ensure_ascii=False)
    if kind.name == "text":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind.name == "float":
        return float(value)
    if kind.name == "list":
        assert kind.item is not None
        return [fitted(own, kind.item) for own in value]
    if kind.name == "struct":
        return {name: fitted(value.get(name), own) for name, own in kind.fields.items()}
    return value


def is_exact(value: Any, kind: Kind) -> bool:
    """Whether a column of this kind gives the value back as it was."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if isinstance(value, int) and kind.name == "float":
        return abs(value) <= MAX_EXACT
    return value is not None and fitted(value, kind) == value


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Names what a column holds: the entry `name` of a record's field `source`, or where that is
    "" the field `name` itself."""

    source: str
    name: str


class Columns:
    """The columns that the records of a table have brought so far, in the order in which they came.
    Widened by the one that writes the table.

    fixed: names that these columns may not have, whatever their case; fields: those of a record
    that are no columns of this kind.
    """

    def __init__(self, fixed: Collection[str], fields: Collection[str]) -> None:
        self._fixed = frozenset(name.casefold() for name in fixed)
        self._fields = frozenset((*fields, *SOURCES))
        self._names: dict[Origin, str] = {}
        self._taken: set[str] = set()
        self._kinds: dict[Origin, Kind] = {}

    def items(self) -> Iterator[tuple[str, Origin, Kind]]:
        """Yields the columns: name, origin, kind."""
        for origin, name in self._names.items():
            yield name, origin, self._kinds[origin]

    def add(self, values: Mapping[str, Any]) -> None:
        """Widens the columns by the values of a record."""
        for origin, value in self._values(values):
            known = self._kinds.get(origin)
            if known is None or value is not None:
                self.widen(origin, kind_of(value))

    def widen(self, origin: Origin, kind: Kind, name: str | None = None) -> None:
        """Widens one column. name: that it has in an earlier part."""
        if origin not in self._names:
            if len(self._names) >= MAX_COLUMNS:
                return
            self._names[origin] = self._free(origin, name or origin.name)
            self._taken.add(self._names[origin].casefold())
        self._kinds[origin] = widened(self._kinds.get(origin, NONE), kind)

    def cells(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the cells of a record."""
        found = dict(self._values(values))
        return {name: fitted(found.get(own), kind) for name, own, kind in self.items()}

    def rest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the cells of a record do not give back exactly."""
        left: dict[str, Any] = {}
        for origin, value in self._values(values):
            kind = self._kinds.get(origin)
            if kind is not None and is_exact(value, kind):
                continue
            if origin.source:
                left.setdefault(origin.source, {})[origin.name] = value
            elif value is not None:
                left[origin.name] = value
        return left

    def _values(self, values: Mapping[str, Any]) -> Iterator[tuple[Origin, Any]]:
        for source in SOURCES:
            entries = values.get(source)
            for name, value in (entries or {}).items() if isinstance(entries, Mapping) else ():
                yield Origin(source=source, name=name), value
        for name, value in values.items():
            if name not in self._fields:
                yield Origin(source="", name=name), value

    def _free(self, origin: Origin, wanted: str) -> str:
        """Returns a name that no other column has."""
        names: Sequence[str] = (wanted, f"{PREFIXES[origin.source]}_{origin.name}")
        for name in names:
            if name and name.casefold() not in self._fixed | self._taken:
                return name
        number = 2
        while f"{names[1]}_{number}".casefold() in self._fixed | self._taken:
            number += 1
        return f"{names[1]}_{number}"


def restored(cells: Mapping[str, Any], columns: Columns, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a record from its cells, and from what they do not give back."""
    values: dict[str, Any] = {}
    for name, origin, _ in columns.items():
        value = cells.get(name)
        if value is not None and origin.source:
            values.setdefault(origin.source, {})[origin.name] = value
        elif value is not None:
            values[origin.name] = value
    for name, value in rest.items():
        if name in SOURCES and isinstance(value, Mapping):
            values[name] = {**values.get(name, {}), **value}
        else:
            values[name] = value
    return values
