"""Declared: what is said of a field of a record, once, where the field is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .columns import Kind

TEXT, INT, FLOAT = Kind(name="text"), Kind(name="int"), Kind(name="float")
JSON = Kind(name="json")
Kept = Literal["always", "tables", "if any"]
InCsv = Literal["first", "last", "if any", "never"]
DECLARED = "declared"  # the key of a field's metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Says what a field of a record is, and where it is kept.

    says: in one sentence what it is. page: a link of the guide that says more, from docs/.
    kind: of its column in a table.
    kept: where it is even if it is empty: "always", in lines of JSON and tables of Parquet;
        "tables", in the latter; "if any", nowhere.
    csv: where a table in CSV has it: before the answers and carried columns, after them, at the
        end if a record has any, or never. parts: {column: key} of an object that it has in parts.
    """

    says: str
    kind: Kind
    kept: Kept = "if any"
    csv: InCsv = "if any"
    parts: Mapping[str, str] = field(default_factory=dict)
    page: str = ""


def row(
    says: str, empty: Any, kind: Kind, kept: Kept = "if any", csv: InCsv = "if any", **more: Any
) -> Any:
    """Returns a field of a dataclass. empty: its value where it has none. For the others see
    Declared."""
    told = {DECLARED: Declared(says=says, kind=kind, kept=kept, csv=csv, **more)}
    if isinstance(empty, dict):
        return field(default_factory=dict, metadata=told)
    return field(default=empty, metadata=told)


def struct(**fields: Kind) -> Kind:
    """Returns the kind of an object."""
    return Kind(name="struct", fields=fields)


def plain_kinds(own: Mapping[str, Declared], names: Iterable[str]) -> dict[str, Kind]:
    """Returns the columns of fields in a table that has no objects, with their kinds."""
    kinds: dict[str, Kind] = {}
    for name in names:
        kind, parts = own[name].kind, own[name].parts
        kinds |= {column: kind.fields[key] for column, key in parts.items()} or {name: kind}
    return kinds


def plain_cells(
    own: Mapping[str, Declared], names: Iterable[str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the cells of these columns. values: the JSON object of a record."""
    cells: dict[str, Any] = {}
    for name in names:
        value, parts = values.get(name), own[name].parts
        inner = {column: None if value is None else value[key] for column, key in parts.items()}
        cells |= inner or {name: value}
    return cells
