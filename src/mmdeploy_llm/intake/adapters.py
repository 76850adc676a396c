"""What intake does for a prompt with an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mmdeploy_llm.adapter_ref import AdapterRef
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.request import MediaSpan

FindAdapter = Callable[[str], AdapterRef]  # raises RequestError


def no_adapter(name: str) -> AdapterRef:
    """Refuses every name: an intake without an engine has no adapters."""
    raise RequestError(f"there is no adapter {name!r}: none is loaded")


def spans_of(spans: tuple[MediaSpan, ...], ref: AdapterRef) -> tuple[MediaSpan, ...]:
    """Returns the media of a prompt, those that the model encodes with an adapter that changes the
    encoder under a key of its own."""
    if not ref.has_media:
        return spans
    return tuple(
        span
        if span.item.embeds is not None
        else replace(
            span, item=replace(span.item, key=f"{span.item.key}@{ref.key}", adapter=ref.key)
        )
        for span in spans
    )
