"""LocalAdapters: the part of a local desk that knows its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from mmdeploy_llm.adapter_ref import AdapterRef
from mmdeploy_llm.engine import Engine
from mmdeploy_llm.startup.adapters import AdapterTable

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
