"""Reads the bodies of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import RequestError

from .chat import message_of
from .params import OUR_OWN, Body, sampling_of, thinking_of, tools_of

LOGPROBS = "message.output_text.logprobs"


def response_fields(body: Body) -> dict[str, Any]:
    """Returns the fields of our own line. Raises RequestError."""
    given = body.take("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("the body needs 'input', a text or a list of items")
    messages: list[Any] = []
    for number, item in enumerate(given):
        _add(messages, item, number)
    instructions = body.take("instructions")
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
    reasoning = body.take("reasoning", {})
    effort = reasoning.get("effort") if isinstance(reasoning, Mapping) else None
    tools = tools_of(body)
    if tools:
        tools["tools"] = [_tool(tool, number) for number, tool in enumerate(tools["tools"])]
    return {
        "messages": messages,
        **tools,
        **thinking_of(body, effort),
        **body.taken(*OUR_OWN),
        "sampling_params": {**_format(body), **sampling_of(body), **_logprobs(body)},
    }


def _add(messages: list[Any], item: Any, number: int) -> None:
    """Adds an item of the input to the messages."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        own = {name: value for name, value in item.items() if name in ("role", "content")}
        messages.append(message_of(own, number))
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") == "assistant" and last.get("tool_calls"):
            last["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else message_of({"content": output}, number)
        text = content if isinstance(content, str) else content.get("content")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
    elif kind != "reasoning":  # of an earlier answer: it is not repeated
        raise RequestError(f"item {number} of 'input' is a {str(kind)[:40]!r}; it is not supported")


def _tool(tool: Any, number: int) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise RequestError(f"tool {number} is a {str(kind)[:40]!r}; only functions are supported")
    if isinstance(tool.get("function"), Mapping):
        return tool
    names = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _format(body: Body) -> dict[str, Any]:
    """Takes the format of the text."""
    text = body.take("text", {})
    form = text.get("format") if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or text.get("verbosity") not in (None, "medium"):
        raise RequestError(f"text {str(text)[:60]!r} is not supported: it has a format only")
    if not isinstance(form, Mapping) or form.get("type") == "text":
        return {}
    if form.get("type") == "json_schema":
        return {"response_format": {"type": "json_schema", "json_schema": {**form}}}
    return {"response_format": dict(form)}


def _logprobs(body: Body) -> dict[str, Any]:
    wanted, top = body.take("include", ()), body.take("top_logprobs")
    is_wanted = isinstance(wanted, list) and LOGPROBS in wanted
    return {"logprobs": top or 0} if is_wanted or top else {}
