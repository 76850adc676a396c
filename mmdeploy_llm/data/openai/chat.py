"""Reads the bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import RequestError

from .params import OUR_OWN, Body, chat_logprobs, sampling_of, thinking_of, tools_of


def chat_fields(body: Body) -> dict[str, Any]:
    """Returns the fields of our own line for a chat. Raises RequestError."""
    messages = body.take("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("the body needs 'messages', a list with at least one message")
    return {
        "messages": [message_of(message, number) for number, message in enumerate(messages)],
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


def message_of(message: Any, number: int) -> Any:
    """Returns a message in our names; its parts are left to what reads messages. Raises
    RequestError."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {type(message).__name__}")
    if message.get("function_call") or message.get("role") == "function":
        raise RequestError(f"{where} has a function_call; use tool_calls and the role tool")
    kept = {
        name: value
        for name, value in message.items()
        if value is not None and name not in ("refusal", "audio", "annotations", "function_call")
    }
    content = message.get("content")
    if isinstance(content, list):
        kept["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in content
        ]
    elif "content" in message and content is None:
        kept["content"] = None
    return kept
