"""Reads the bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import KindTable

from .params import OUR_OWN, Body, chat_logprobs, sampling_of, thinking_of, tools_of

PICTURES = ("image_url", "input_image", "image_pil", "image")
MAX_TYPE = 100  # characters at the beginning of a data: URL
FILES = ("file", "input_file")
ROLES = {"developer": "system"}


def chat_fields(body: Body) -> dict[str, Any]:
    """Returns the fields of our own line for a chat. Raises RequestError."""
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("the body needs 'messages', a list with at least one message")
    return {
        "messages": [
            message_of(message, number, body.kinds) for number, message in enumerate(messages)
        ],
        **tools_of(body),
        **thinking_of(body, body.take("reasoning_effort")),
        **body.taken(*OUR_OWN),
        "sampling_params": {**sampling_of(body), **chat_logprobs(body)},
    }


def completion_fields(body: Body) -> dict[str, Any]:
    """Returns the fields of our own line for a plain completion. Raises RequestError."""
    prompt = body.take("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        fields: dict[str, Any] = {"prompt": prompt}
    elif isinstance(prompt, list) and prompt and all(isinstance(own, int) for own in prompt):
        fields = {"prompt_token_ids": prompt}
    else:
        raise RequestError(
            "the body's 'prompt' must be a text or a list of token ids; several prompts are "
            "several lines"
        )
    logprobs = body.taken("logprobs")
    return {
        **fields,
        **body.taken("priority"),
        "sampling_params": {**sampling_of(body), **logprobs},
    }


def message_of(message: Any, number: int, kinds: KindTable) -> Any:
    """Returns a message with parts in our names. Raises RequestError."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}")
    if message.get("function_call") or message.get("role") == "function":
        raise RequestError(f"{where} has a function_call; use tool_calls and the role tool")
    role = message.get("role")
    kept = {
        name: value
        for name, value in message.items()
        if value is not None and name not in ("refusal", "audio", "annotations", "function_call")
    }
    if isinstance(role, str):
        kept["role"] = ROLES.get(role, role)
    content = message.get("content")
    if isinstance(content, list):
        kept["content"] = [
            part_of(part, f"{where}, part {place}", kinds) for place, part in enumerate(content)
        ]
    elif "content" in message and content is None:
        kept["content"] = None
    return kept


def part_of(part: Any, where: str, kinds: KindTable) -> Any:
    """Returns a part of a message: a text, a picture or a file. Others, such as sound, are left to
    what reads prompts. Raises RequestError for a picture or a file without a source."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text"):
        return {"type": "text", "text": part.get("text")}
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if kind in FILES:
        return _file_of(part, where, kinds)
    if kind not in PICTURES:
        return part
    source = part.get("image_url", part.get(kind))
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        hint = "; files that were uploaded are not here" if part.get("file_id") else ""
        raise RequestError(f"{where}: {kind} has no URL{hint}")
    name = "image_url" if isinstance(source, str) else "image"
    return {"type": name, name: {"url": source} if name == "image_url" else source}


def _file_of(part: Mapping[str, Any], where: str, kinds: KindTable) -> dict[str, Any]:
    """Returns a file as media of the kind that its name or its data: URL says."""
    inner = part.get("file")
    own: Mapping[str, Any] = inner if isinstance(inner, Mapping) else part
    source = own.get("file_data") or own.get("file_url")
    if not isinstance(source, str):
        hint = "; files that were uploaded are not here" if own.get("file_id") else ""
        raise RequestError(f"{where}: {part['type']} has no file_data and no file_url{hint}")
    is_data = source[:5].lower() == "data:"
    named = own.get("filename") or ("" if is_data else urlsplit(source).path)
    announced = source[5:MAX_TYPE].partition(",")[0].partition(";")[0] if is_data else ""
    names = (str(named), f"x{mimetypes.guess_extension(announced) or ''}")
    kind = next(filter(None, map(kinds.of_name, names)), None)
    if kind is None:
        raise RequestError(
            f"{where}: the file {str(named or announced)[:80]!r} is of no kind of media that is "
            f"known: {', '.join(kinds.kinds)}"
        )
    if not is_data and own.get("file_data"):
        source = f"data:;base64,{source}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": source}}
