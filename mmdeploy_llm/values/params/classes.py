"""JSON schemas of pydantic's classes, given where a schema is expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN = ("enum", "const", "default", "examples")  # they hold values, not schemas


def is_model(value: Any) -> bool:
    """Whether the value is a class with a JSON schema, such as one of pydantic's BaseModel."""
    return isinstance(value, type) and callable(getattr(value, "model_json_schema", None))


def schema_of(model: Any) -> dict[str, Any]:
    """Returns the schema of a class. Its objects have no fields but those of the class, unless its
    configuration says so: a model that is guided by it would invent some."""
    closed: dict[str, Any] = _closed(model.model_json_schema())
    return closed


def as_schema(value: Any) -> Any:
    """Returns the schema of a class, and anything else as it is. Raises ValueError for a class
    without one."""
    if is_model(value):
        return schema_of(value)
    if isinstance(value, type):
        raise ValueError(f"the class {value.__name__} has no schema; give a class of pydantic")
    return value


def as_format(value: Any) -> Any:
    """Returns the response_format of a class, and anything else as it is."""
    if not isinstance(value, type):
        return value
    schema = {"name": value.__name__, "schema": as_schema(value)}
    return {"type": "json_schema", "json_schema": schema}


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: own if name in PLAIN else _closed(own) for name, own in schema.items()}
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    return found
