"""Turns records into the lines that OpenAI's Batch API writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import OK

from .lines import CHAT, COMPLETIONS, RESPONSES

# Our finish reasons that OpenAI has not.
REASONS = {"repetition": "length", "abort": "stop", "error": "stop"}
OBJECTS = {CHAT: "chat.completion", COMPLETIONS: "text_completion", RESPONSES: "response"}
PREFIXES = {CHAT: "chatcmpl", COMPLETIONS: "cmpl", RESPONSES: "resp"}


def line_of(record: Record, model: str, created: int) -> dict[str, Any]:
    """Returns the line of a record. model: its name. created: seconds of the epoch."""
    digest = blake2b(
        f"{record.key}\0{record.item_digest}".encode("utf-8", "replace"), digest_size=12
    )
    own = digest.hexdigest()
    endpoint = record.endpoint or CHAT
    error: dict[str, Any] | None = None
    if record.error is None:
        body = {
            "id": f"{PREFIXES[endpoint]}-{own}",
            "object": OBJECTS[endpoint],
            **(_response(record, model, created, own) if endpoint == RESPONSES else {}),
        }
        if endpoint != RESPONSES:
            choices = list(_choices(record, endpoint))
            body |= {"created": created, "model": model, "choices": choices}
            body |= {"usage": _usage(record), "system_fingerprint": None}
    else:
        error = {"code": str(record.error.code), "message": record.error.message}
        body = {"error": {**error, "type": record.error.kind, "param": None}}
    custom_id = None if record.id is None else str(record.id)
    code = OK if record.error is None else record.error.code
    response = {"status_code": code, "request_id": f"req_{own}", "body": body}
    return {
        "id": f"batch_req_{own}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _choices(record: Record, endpoint: str) -> Iterator[dict[str, Any]]:
    for index, sample in enumerate(_samples(record)):
        reason = sample["finish_reason"]
        choice: dict[str, Any] = {"index": index}
        if endpoint == COMPLETIONS:
            choice |= {"text": sample["text"], "logprobs": _plain_logprobs(sample)}
        else:
            choice |= {"message": _message(sample), "logprobs": _logprobs(sample)}
        yield {**choice, "finish_reason": REASONS.get(reason, reason)}


def _samples(record: Record) -> list[Mapping[str, Any]]:
    """Returns the samples, or the record itself as the only one."""
    if record.outputs:
        return list(record.outputs)
    names = ("text", "reasoning", "finish_reason", "tool_calls")
    return [{name: getattr(record, name) for name in names}]


def _message(sample: Mapping[str, Any]) -> dict[str, Any]:
    calls = list(sample.get("tool_calls") or ())
    content = None if calls and not sample["text"] else sample["text"]
    message = {"role": "assistant", "content": content, "refusal": None}
    if sample.get("reasoning"):
        message["reasoning_content"] = sample["reasoning"]
    return {**message, "tool_calls": calls} if calls else message


def _logprobs(sample: Mapping[str, Any]) -> dict[str, Any] | None:
    if sample.get("logprobs") is None:
        return None
    return {"content": list(_tokens(sample)), "refusal": None}


def _tokens(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for candidates in sample["logprobs"]:
        if candidates:  # the sampled one comes first
            ranked = sorted(candidates, key=lambda own: own.get("rank", 0))
            top = [own for place, own in enumerate(ranked, 1) if own.get("rank") == place]
            yield {**_token(candidates[0]), "top_logprobs": [_token(own) for own in top]}


def _token(own: Mapping[str, Any]) -> dict[str, Any]:
    text = own.get("decoded_token") or ""
    data = list(text.encode("utf-8", "replace"))
    return {"token": text, "logprob": own["logprob"], "bytes": data}


def _plain_logprobs(sample: Mapping[str, Any]) -> dict[str, Any] | None:
    if sample.get("logprobs") is None:
        return None
    tokens = list(_tokens(sample))
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token["token"])
    return {
        "tokens": [own["token"] for own in tokens],
        "token_logprobs": [own["logprob"] for own in tokens],
        "top_logprobs": [
            {top["token"]: top["logprob"] for top in own["top_logprobs"]} for own in tokens
        ],
        "text_offset": offsets,
    }


def _usage(record: Record) -> dict[str, Any]:
    return {
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_output_tokens,
        "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.num_cached_tokens},
    }


def _response(record: Record, model: str, created: int, own: str) -> dict[str, Any]:
    """Returns the fields of a response of /v1/responses."""
    is_cut = record.finish_reason in ("length", "repetition")
    status = "incomplete" if is_cut else "completed"
    output: list[dict[str, Any]] = []
    if record.reasoning:
        thought = {"type": "reasoning_text", "text": record.reasoning}
        output.append({"id": f"rs_{own}", "type": "reasoning", "summary": [], "content": [thought]})
    if record.text or not record.tool_calls:
        text: dict[str, Any] = {"type": "output_text", "text": record.text, "annotations": []}
        sample = next(iter(record.outputs), {})
        if sample.get("logprobs") is not None:
            text["logprobs"] = list(_tokens(sample))
        message = {"id": f"msg_{own}", "type": "message", "role": "assistant", "status": status}
        output.append({**message, "content": [text]})
    for number, call in enumerate(record.tool_calls):
        function = call["function"]
        item = {"id": f"fc_{own}_{number}", "type": "function_call", "call_id": call.get("id")}
        output.append(
            {**item, "name": function["name"], "arguments": function["arguments"], "status": status}
        )
    return {
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": model,
        "output": output,
        "usage": {
            "input_tokens": record.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.num_cached_tokens},
            "output_tokens": record.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
        },
    }


def as_line(values: Mapping[str, Any]) -> bytes:
    """Returns a line as bytes."""
    return json.dumps(values, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
