"""LocalAdapters: the part of a local desk that knows its adapters, and finds those of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.intake.prompts import adapter_of
from mmdeploy_llm.layers.adapters.attached.table import AdapterTable
from mmdeploy_llm.request import MediaSpan, Request
from mmdeploy_llm.values.adapter_ref import AdapterRef

from .ask import Ask
from .desk import Desk


class LocalAdapters(Desk):
    """Base of LocalDesk, which sets both attributes."""

    engine: Engine
    _table: AdapterTable

    def load_adapter(self, name: str, source: str) -> AdapterRef:
        """Makes an adapter known; see Desk."""
        self.check()
        return self._table.load(name, source)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; see Desk."""
        self.check()
        self._check_unused(name)
        key = self._table.unload(name).key
        self._post(partial(self.engine.drop_adapter, key))

    def adapters(self) -> Mapping[str, AdapterRef]:
        """Returns the adapters by name; see Desk."""
        self.check_open()
        return self._table.refs

    def _adapter_of(self, ask: Ask) -> AdapterRef | None:
        """Returns the adapter that a prompt names, or the call; None for none. Raises
        RequestError."""
        name = adapter_of(ask.prompt, ask.adapter or self.runtime.options.default_adapter)
        return self._table.find(name) if name else None


def with_adapter(requests: tuple[Request, ...], ref: AdapterRef | None) -> tuple[Request, ...]:
    """Gives the requests of a prompt their adapter. Where it changes what encodes media, theirs
    have keys of their own."""
    for request in requests if ref is not None else ():
        request.adapter = ref
        if ref is not None and ref.has_media:
            request.media = tuple(_span(span, ref) for span in request.media)
    return requests


def _span(span: MediaSpan, ref: AdapterRef) -> MediaSpan:
    if span.item.embeds is not None:  # nothing encodes it
        return span
    item = replace(span.item, key=f"{span.item.key}@{ref.key}", adapter=ref.key)
    return replace(span, item=item)
