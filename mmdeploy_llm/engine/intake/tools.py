"""Reads the tools of a request: checks them and returns the JSON schemas that chat templates
take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from inspect import isroutine
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.values.outputs.request_output import ToolCall

FORM = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'


def read_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools, each as {"type": "function", "function": {"name", "parameters", ...}}.

    tools: such a dict or a list of them; objects with `model_dump` and Python functions with type
        hints and a docstring are accepted too. None and [] become ().

    Raises RequestError that says which tool is wrong.
    """
    if tools is None:
        return ()
    is_many = isinstance(tools, (list, tuple))
    read = tuple(
        _tool(tool, f"tool {index}") for index, tool in enumerate(tools if is_many else [tools])
    )
    names = [tool["function"]["name"] for tool in read]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"several tools are named {twice[0]!r}; a name may occur once")
    return read


def template_calls(calls: Any, location: str) -> list[Any]:
    """Returns the `tool_calls` of an assistant message as templates read them: arguments as an
    object.

    calls: ToolCalls of an output, or dicts with "function" or with "name" and "arguments".
    location: names the message in errors.

    Arguments that are the text of a JSON object become the object. Raises RequestError.
    """
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{location}: 'tool_calls' must be a list, got {_brief(calls)}")
    return [_call(call, f"{location}, tool call {index}") for index, call in enumerate(calls)]


def _call(call: Any, location: str) -> Mapping[str, Any]:
    if isinstance(call, ToolCall):
        call = call.to_dict()
    elif callable(getattr(call, "model_dump", None)):
        call = call.model_dump(exclude_none=True)
    if not isinstance(call, Mapping):
        raise RequestError(f"{location} must be a dict with a 'function', got {_brief(call)}")
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _with_object(function)}
    return _with_object(call)


def _with_object(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces arguments that are the text of a JSON object by the object; leaves others
    unchanged."""
    given = function.get("arguments")
    if not isinstance(given, str):
        return function
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return function
    return {**function, "arguments": value} if isinstance(value, dict) else function


def _tool(tool: Any, location: str) -> Mapping[str, Any]:
    if isroutine(tool):
        return _schema(tool, location)
    if callable(getattr(tool, "model_dump", None)):
        tool = tool.model_dump(exclude_none=True)
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(f"{location} must be {FORM}, got {_brief(tool)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{location} needs a name under 'function', got {_brief(name)}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{location} ({name!r}): 'parameters' must be a JSON schema, a dict, got "
            f"{_brief(parameters)}"
        )
    try:
        json.dumps(tool)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{location} ({name!r}) cannot be written as JSON: {error}") from error
    return {"type": "function", **tool}


def chosen_tools(given: Any, variables: dict[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools of a chat, given as an argument or among the template's variables, from
    which they are removed."""
    other = variables.pop("tools", None)
    if other is not None and given is not None:
        raise RequestError("tools are given twice, once in chat_template_kwargs; leave out one")
    return read_tools(other if given is None else given)


def _schema(function: Any, location: str) -> Mapping[str, Any]:
    """Returns the JSON schema of a Python function."""
    from transformers.utils import get_json_schema

    try:
        schema: Mapping[str, Any] = get_json_schema(function)
    except Exception as error:
        raise RequestError(
            f"{location}: {getattr(function, '__name__', 'the function')} has no schema: "
            f"{error_text(error)}"
        ) from error
    return schema


def _brief(value: Any) -> str:
    """Shows a dict by its keys, else a short value or its type."""
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, list(value)[:8])) or 'no keys'}"
    return repr(value) if isinstance(value, (str, int, type(None))) else type(value).__name__
