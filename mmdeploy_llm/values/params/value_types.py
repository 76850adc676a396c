"""Types of a request's options that accept several spellings: words, token ids, schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from .frozen import MAX_INT, Accepts

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


MAX_WORDS = 1024  # stop texts and bad words: each one is searched for at every token
MAX_PROCESSORS = 16  # logits processors of one request


def _as_tuple(value: Any) -> Any:
    """Wraps a single string or number in a tuple and turns a list into one."""
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _as_sequences(value: Any) -> Any:
    """Turns ids and lists of ids into a tuple of tuples; a single id is a sequence of its own."""
    found = _as_tuple(value)
    if not isinstance(found, tuple):
        return found
    sequences = tuple(_as_tuple(one) for one in found)
    if () in sequences:
        raise ValueError("an empty sequence matches everywhere; remove it")
    return sequences


def _as_processors(value: Any) -> Any:
    names = _as_tuple(value)
    if callable(value) or (isinstance(names, tuple) and any(map(callable, names))):
        raise ValueError(
            "functions and classes are not accepted: give the name of a processor that a plugin "
            "provides with provide_logits_processors"
        )
    return names


def _as_words(value: Any) -> Any:
    words = _as_tuple(value)
    if isinstance(words, tuple) and any(word == "" for word in words):
        raise ValueError("an empty string matches everywhere; remove it")
    return words


Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_words),
    Field(max_length=MAX_WORDS),
    Accepts("str | Sequence[str]"),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[
    tuple[TokenId, ...], BeforeValidator(_as_tuple), Accepts("int | Sequence[int]")
]
Sequences = Annotated[
    tuple[tuple[TokenId, ...], ...],
    BeforeValidator(_as_sequences),
    Accepts("int | Sequence[int] | Sequence[Sequence[int]]"),
]
Processors = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_processors),
    Field(max_length=MAX_PROCESSORS),
    Accepts("str | Sequence[str]"),
]
Format = Annotated[dict[str, Any], Accepts("Mapping[str, Any] | type[BaseModel]")]
Schema = Annotated[
    dict[str, Any] | str | None,
    BeforeValidator(as_schema),
    Accepts("Mapping[str, Any] | str | type[BaseModel]"),
]
