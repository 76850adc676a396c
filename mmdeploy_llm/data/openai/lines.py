"""Turns a line of OpenAI's Batch API into one of our own:

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mmdeploy_llm.errors import RequestError

from .chat import chat_fields, completion_fields
from .params import HARMLESS, Body
from .responses import response_fields

logger = logging.getLogger(__name__)

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS: Mapping[str, Callable[[Body], dict[str, Any]]] = {
    CHAT: chat_fields,
    COMPLETIONS: completion_fields,
    RESPONSES: response_fields,
}
KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A line as one of our own. fields: of it. endpoint: that it was meant for."""

    fields: dict[str, Any]
    endpoint: str


def is_openai_line(values: Any) -> bool:
    """Whether a line is one of OpenAI's."""
    return isinstance(values, Mapping) and "custom_id" in values and "body" in values


def custom_id_of(values: Mapping[str, Any]) -> str | None:
    """Returns the id of a line; None when it has none that is one."""
    own = values.get("custom_id")
    return own if isinstance(own, str) and own else None


class OpenAILines:
    """Translates the lines of an input; warns once of each field that it ignores. Used by one
    thread."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def translated(self, values: Mapping[str, Any]) -> Translated:
        """Returns our own line. Raises RequestError."""
        custom_id = custom_id_of(values)
        if custom_id is None:
            raise RequestError("custom_id must be a text that is not empty")
        given = _body(values)
        endpoint = _endpoint(values, given)
        body = Body(given)
        fields = ENDPOINTS[endpoint](body)
        ignored = body.ignored()
        for name in values:
            if name not in KEYS and name not in HARMLESS and values[name] is not None:
                raise RequestError(
                    f"the line has an unknown key {str(name)[:80]!r}; known: {', '.join(KEYS)}"
                )
        self._tell([*ignored, *(name for name in values if name in HARMLESS)])
        if not fields["sampling_params"]:
            del fields["sampling_params"]
        return Translated(fields={"id": custom_id, **fields}, endpoint=endpoint)

    def _tell(self, ignored: list[str]) -> None:
        fresh = [name for name in ignored if name not in self._told]
        if fresh:
            self._told.update(fresh)
            logger.warning(
                "ignored in lines of OpenAI's format, where they change no answer: %s",
                ", ".join(fresh),
            )


def _body(values: Mapping[str, Any]) -> Mapping[str, Any]:
    body = values["body"]
    if isinstance(body, str):  # a cell of a table
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            body = None
    if not isinstance(body, Mapping) or not all(isinstance(name, str) for name in body):
        raise RequestError("the body must be an object")
    return body


def _endpoint(values: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """Returns the path that the URL names; without one, that of the body's fields."""
    method, url = values.get("method") or "POST", values.get("url")
    if str(method).upper() != "POST":
        raise RequestError(f"the method must be POST, got {str(method)[:40]!r}")
    if not url:
        return RESPONSES if "input" in body else COMPLETIONS if "prompt" in body else CHAT
    try:
        path = urlsplit(str(url)).path.rstrip("/")
    except ValueError:
        path = ""
    path = path if path.startswith("/v1/") else f"/v1/{path.lstrip('/')}"
    if path not in ENDPOINTS:
        raise RequestError(
            f"the url {str(url)[:80]!r} is not supported; known: {', '.join(ENDPOINTS)}"
        )
    return path
