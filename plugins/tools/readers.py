"""What stands between the tags of a call, read: name and arguments, or why it is no call."""

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
    """The text is no call."""


class OpenTextError(NoCallError):
    """The text ends inside a value: what looked like the end of the call belongs to the value."""


def read_json(body: str, schemas: Schemas) -> ToolCall:
    """The call of {"name": ..., "arguments": {...}}, the arguments as they are written.

    A missing last brace is forgiven. Raises NoCallError.
    """
    del schemas  # JSON says what is a number
    members = _members(body.strip())
    name = _loads(members.get("name", "null"))
    given = next((members[key] for key in ARGUMENTS if key in members), "null")
    value = _loads(given)
    if isinstance(value, str):  # the object once more as a text
        given, value = value, _loads(value)
    if value is None:
        given, value = "{}", {}
    if not isinstance(name, str) or not name or not isinstance(value, dict):
        raise NoCallError("the name must be a text and the arguments an object")
    return ToolCall(name=name, arguments=given)


def read_xml(body: str, schemas: Schemas) -> ToolCall:
    """The call of <function=name><parameter=x>value</parameter></function>.

    A value loses one line break at either end. It is a text where its schema says so or there is
    none, else JSON if it can be read as such. Raises NoCallError.
    """
    if "<function=" in body and "</function>" not in body:
        raise OpenTextError("the function is not closed")
    function = _FUNCTION.fullmatch(body.strip())
    if function is None:
        raise NoCallError("no function")
    name, inner = function[1].strip(), function[2]
    known = schemas.get(name, {}).get("properties")
    properties = known if isinstance(known, Mapping) else {}
    arguments: dict[str, Any] = {}
    place = 0
    while parameter := _PARAMETER.match(inner, place):
        key = parameter[1].strip()
        arguments[key] = _typed(_unwrapped(parameter[2]), properties.get(key))
        place = parameter.end()
    rest = inner[place:].strip()
    if rest:
        error = OpenTextError if rest.startswith("<parameter=") else NoCallError
        raise error("text that is no parameter")
    return ToolCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def read_channel(body: str, schemas: Schemas) -> ToolCall:
    """The call of a message of gpt-oss to a tool, whose arguments are JSON. Raises NoCallError."""
    del schemas
    message = _MESSAGE.fullmatch(body)
    recipient = (message[1] or message[2]) if message else None
    name = recipient.removeprefix("functions.") if recipient else ""
    if message is None or not name:
        raise NoCallError("no message to a tool")
    given = message[3].strip()
    if not isinstance(_loads(given), dict):
        raise NoCallError("the arguments must be an object")
    return ToolCall(name=name, arguments=given)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written."""
    members: dict[str, str] = {}
    place = _behind(text, 0, "{")
    while not text.startswith("}", place):
        key, place = _decode(text, place)
        start = _behind(text, place, ":")
        _, place = _decode(text, start)
        members[str(key)] = text[start:place]
        place = _skip(text, place)
        if place == len(text):  # the last brace is missing
            return members
        if not text.startswith("}", place):
            place = _behind(text, place, ",")
    if _skip(text, place + 1) != len(text):
        raise NoCallError("text behind the object")
    return members


def _behind(text: str, place: int, mark: str) -> int:
    """Where the next word begins behind `mark`, which must come now."""
    place = _skip(text, place)
    if not text.startswith(mark, place):
        raise NoCallError(f"no {mark!r}")
    return _skip(text, place + 1)


def _skip(text: str, place: int) -> int:
    found = _BLANKS.match(text, place)
    assert found is not None
    return found.end()


def _decode(text: str, place: int) -> tuple[Any, int]:
    """A JSON value at `place` and where it ends."""
    try:
        return json.JSONDecoder(parse_constant=_refuse).raw_decode(text, place)
    except json.JSONDecodeError as error:
        is_open = error.msg.startswith("Unterminated string")
        raise (OpenTextError if is_open else NoCallError)(error.msg) from error
    except (ValueError, RecursionError) as error:  # a number too long, nesting too deep
        raise NoCallError(str(error)) from error


def _loads(text: str) -> Any:
    value, place = _decode(text, _skip(text, 0))
    if _skip(text, place) != len(text):
        raise NoCallError("text behind the value")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unwrapped(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _typed(text: str, schema: object) -> Any:
    """The value that `text` stands for under a parameter's JSON schema."""
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
    """The JSON types that a schema allows, as far as it says."""
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
