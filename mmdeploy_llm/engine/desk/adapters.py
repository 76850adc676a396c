"""LocalAdapters: the part of a local desk that knows its adapters, and finds those of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.intake.prompts import adapter_of
from mmdeploy_llm.layers.adapters.attached.table import AdapterTable
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
