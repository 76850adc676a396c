"""Template: a text with columns in it, such as a question about each row of a table."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Collection, Mapping
from typing import Any

from mmdeploy_llm.errors import ConfigError, RequestError

MAX_NAMES, MAX_NAME = 40, 60  # columns in a message, and characters of each


class Template:
    """A question with columns in it: "Describe {title}."; {{ and }} are braces.

    Only plain names are allowed, so that a template can reach nothing but the columns. Raises
    ConfigError for anything else.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[tuple[str, str | None]] = []
        try:
            found = list(string.Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(_fault(text, str(error))) from None
        for words, name, spec, conversion in found:
            if name is not None and (not name or spec or conversion or set(name) & set(".[]")):
                raise ConfigError(_fault(text, f"{{{name}}} is not the plain name of a column"))
            self._parts.append((words, name))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns in it."""
        return tuple(name for _, name in self._parts if name is not None)

    def fill(self, values: Mapping[str, Any]) -> str:
        """Returns the question of a row. Raises RequestError for a column without a text."""
        return "".join(
            words + ("" if name is None else text_of(values, name)) for words, name in self._parts
        )


def text_of(values: Mapping[str, Any], name: str) -> str:
    """Returns the value of a column as text. Raises RequestError without one."""
    value = column_value(values, name)
    if value is None:
        raise RequestError(f"the column {name!r} is empty in this row")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def column_value(values: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a column as records repeat it and questions have it: what JSON holds;
    dates, times and decimals as text, NaN as None. Raises RequestError for a column that is missing
    or has bytes."""
    if name not in values:
        raise RequestError(f"the row has no column {name!r}; it has {shown(values)}")
    return _plain(values[name], name)


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise RequestError(
            f"the column {name!r} holds bytes, which are no text; a record cannot repeat them"
        )
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if hasattr(value, "tolist"):  # an array, or a number of numpy
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item, name) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def shown(names: Collection[str]) -> str:
    """Returns names for a message."""
    first = [repr(str(name)[:MAX_NAME]) for name in list(names)[:MAX_NAMES]]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"{', '.join(first) or 'none'}{more}"


def _fault(text: str, reason: str) -> str:
    return (
        f"the prompt {text[:MAX_NAME]!r} cannot be filled: {reason}; write columns as {{title}}, "
        "and a brace that is meant as {{ or }}"
    )
