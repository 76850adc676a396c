"""AdapterTable: the adapters that requests may name, checked when they are loaded, read into memory
when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.layers.adapters.folder import read_adapter
from mmdeploy_llm.values.adapter_ref import AdapterRef
from mmdeploy_llm.values.text.spelling import meant
from mmdeploy_llm.weights.folder import naming, resolve_adapter

from .attach import Blueprint
from .served import key_of

MAX_SHRINK = 4  # the bytes of a float64 in a file for those of a float16 in memory


class AdapterTable:
    """Adapters by name, as `load` has checked them. Any thread may call it."""

    def __init__(
        self,
        blueprint: Callable[[], Blueprint],
        *,
        max_rank: int | None = None,
        max_bytes: int | None = None,
        is_deterministic: bool = False,
    ) -> None:
        """blueprint: of the model, made for the first adapter. max_rank, max_bytes: of one.
        is_deterministic: whether adapters are refused that torch computes."""
        self._new_blueprint = blueprint
        self._blueprint: Blueprint | None = None
        self._max_rank, self._max_bytes = max_rank, max_bytes
        self._is_deterministic = is_deterministic
        self._refs: dict[str, AdapterRef] = {}
        self._lock = threading.Lock()

    @property
    def refs(self) -> Mapping[str, AdapterRef]:
        """The adapters that requests may name."""
        return dict(self._refs)

    def find(self, name: str) -> AdapterRef:
        """Returns the adapter of this name. Raises RequestError."""
        found = self._refs.get(name)
        if found is not None:
            return found
        known = ", ".join(self._refs) or "none is loaded"
        near = meant(name, self._refs)
        hint = f"did you mean {near!r}? " if near else ""
        raise RequestError(
            f"there is no adapter {name!r}; {hint}known: {known}; load one with "
            "llm.load_adapter(name, folder)"
        )

    def load(self, name: str, source: str) -> AdapterRef:
        """Reads an adapter, checks that this model can have it, and gives it a name, of which it
        replaces another one: requests that are here already keep theirs. source: a folder or an id
        on the hub. Raises ConfigError, and CheckpointError for what is wrong with the files."""
        if not name or not isinstance(name, str):
            raise ConfigError(f"the name of an adapter must be a text, got {name!r}")
        with naming(source, kind=f"adapter {name!r} in"):
            folder = resolve_adapter(source)
            most = None if self._max_bytes is None else self._max_bytes * MAX_SHRINK
            adapter = read_adapter(folder, max_rank=self._max_rank, max_bytes=most)
            with self._lock:
                if self._blueprint is None:
                    self._blueprint = self._new_blueprint()
                attached = self._blueprint.attach(adapter)
                has_media = self._blueprint.has_media(attached)
                self._blueprint.tell(name, adapter)
        ref = AdapterRef(
            name=name,
            folder=str(Path(folder).absolute()),
            key=key_of(name, adapter.digest),
            num_bytes=attached.num_bytes,
            rank=adapter.max_rank,
            num_modules=len(attached.matrices) + len(attached.lookups),
            has_media=has_media,
        )
        if self._is_deterministic and (modules := attached.computed_by_torch):
            raise ConfigError(
                f"deterministic = True cannot be kept with adapter {name!r}: torch computes what "
                f"it changes of {', '.join(modules)}, in an order that depends on the number of "
                "rows; merge it into the model (mmdeploy-llm merge), or leave deterministic out"
            )
        if self._max_bytes is not None and ref.num_bytes > self._max_bytes:
            raise ConfigError(
                f"adapter {name!r} takes {ref.num_bytes} bytes, and adapter_memory is "
                f"{self._max_bytes}; raise it"
            )
        self._refs[name] = ref
        return ref

    def unload(self, name: str) -> AdapterRef:
        """Forgets an adapter and returns it. Raises RequestError for an unknown one."""
        ref = self.find(name)
        self._refs.pop(name, None)
        return ref
