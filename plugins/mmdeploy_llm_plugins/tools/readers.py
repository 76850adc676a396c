"""Readers of a call's body: each returns name and arguments, or raises why it is not a call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from mmdeploy_llm.hooks import ToolCall

ARGUMENTS = ("arguments", "parameters")

_BLANKS = re.compile(r"\s*")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=\n<parameter=))", re.DOTALL
)

_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=([^\s<]+))?<\|channel\|>\w+(?: to=([^\s<]+))?"
    r"(?:\s*<\|constrain\|>\s*\w+|\s+\w+)?\s*<\|message\|>(.*?)(?:<\|call\|>)?",
    re.DOTALL,
)

Schemas = Mapping[str, Mapping[str, Any]]  # tool -> JSON schema of its parameters


class NoCallError(ValueError):
    """The text is not a call."""


class OpenTextError(NoCallError):
    """The text ends inside a value, so the apparent end of the call is part of the value."""


def read_json(body: str, schemas: Schemas) -> ToolCall:
    """Reads {"name": ..., "arguments": {...}}; the arguments keep their spelling.

    The last brace may be missing. Raises NoCallError.
    """
    del schemas  # JSON values carry their types
    members = _members(body.strip())
    name = _loads(members.get("name", "null"))
    given = next((members[key] for key in ARGUMENTS if key in members), "null")
    value = _loads(given)
    if isinstance(value, str):  # the object encoded twice
        given, value = value, _loads(value)
    if value is None:
        given, value = "{}", {}
    if not isinstance(name, str) or not name or not isinstance(value, dict):
        raise NoCallError("the name must be a text and the arguments an object")
    return ToolCall(name=name, arguments=given)


def read_xml(body: str, schemas: Schemas) -> ToolCall:
    """Reads <function=name><parameter=x>value</parameter></function>.

    One line break at each end of a value is dropped. A value is text if its schema says so or there
    is no schema, otherwise JSON if it parses, else text. Raises NoCallError.
    """
    if "<function=" in body and "</function>" not in body:
        raise OpenTextError("the function is not closed")
    function = _FUNCTION.fullmatch(body.strip())
    if function is None:
        raise NoCallError("no <function=...>")
    name, inner = function[1].strip(), function[2]
    known = schemas.get(name, {}).get("properties")
    properties = known if isinstance(known, Mapping) else {}
    arguments: dict[str, Any] = {}
    position = 0
    while parameter := _PARAMETER.match(inner, position):
        key = parameter[1].strip()
        arguments[key] = _typed(_unwrapped(parameter[2]), properties.get(key))
        position = parameter.end()
    rest = inner[position:].strip()
    if rest:
        error = OpenTextError if rest.startswith("<parameter=") else NoCallError
        raise error("text outside a parameter")
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def read_channel(body: str, schemas: Schemas) -> ToolCall:
    """Reads a message of gpt-oss to a tool; its arguments are JSON. Raises NoCallError."""
    del schemas
    message = _MESSAGE.fullmatch(body)
    recipient = (message[1] or message[2]) if message else None
    name = recipient.removeprefix("functions.") if recipient else ""
    if message is None or not name:
        raise NoCallError("not a message to a tool")
    given = message[3].strip()
    if not isinstance(_loads(given), dict):
        raise NoCallError("the arguments must be an object")
    return ToolCall(name=name, arguments=given)


def _members(text: str) -> dict[str, str]:
    """Returns the members of a JSON object, each value with its original spelling."""
    members: dict[str, str] = {}
    position = _after(text, 0, "{")
    while not text.startswith("}", position):
        key, position = _decode(text, position)
        start = _after(text, position, ":")
        _, position = _decode(text, start)
        members[str(key)] = text[start:position]
        position = _skip(text, position)
        if position == len(text):  # the last brace is missing
            return members
        if not text.startswith("}", position):
            position = _after(text, position, ",")
    if _skip(text, position + 1) != len(text):
        raise NoCallError("text after the object")
    return members


def _after(text: str, position: int, mark: str) -> int:
    """Returns the start of the next token after `mark`. Raises NoCallError without the mark."""
    position = _skip(text, position)
    if not text.startswith(mark, position):
        raise NoCallError(f"no {mark!r}")
    return _skip(text, position + 1)


def _skip(text: str, position: int) -> int:
    found = _BLANKS.match(text, position)
    assert found is not None
    return found.end()


def _decode(text: str, position: int) -> tuple[Any, int]:
    """Decodes the JSON value at `position`; returns it and its end. Raises NoCallError."""
    try:
        return json.JSONDecoder(parse_constant=_refuse).raw_decode(text, position)
    except json.JSONDecodeError as error:
        is_open = error.msg.startswith("Unterminated string")
        raise (OpenTextError if is_open else NoCallError)(error.msg) from error
    except (ValueError, RecursionError) as error:  # a number too long, nesting too deep
        raise NoCallError(str(error)) from error


def _loads(text: str) -> Any:
    value, position = _decode(text, _skip(text, 0))
    if _skip(text, position) != len(text):
        raise NoCallError("text after the value")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unwrapped(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: object) -> Any:
    """Converts `text` to the type in a parameter's JSON schema; keeps the text if it cannot."""
    kinds = _kinds(schema)
    if text.strip().lower() in ("null", "none") and "null" in kinds:
        return None
    if not kinds or "string" in kinds:
        return text
    if kinds == {"boolean"} and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        return _loads(text.strip())
    except NoCallError:
        return text


def _kinds(schema: object) -> set[str]:
    """Returns the JSON types that a schema names; empty when it names none."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set()
    if isinstance(given, (list, tuple)):
        kinds = {kind for kind in given if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        for option in options if isinstance(options, (list, tuple)) else ():
            kinds |= _kinds(option)
    return kinds
