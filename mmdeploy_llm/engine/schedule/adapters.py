"""AdapterBudget: which adapters are in memory, who needs them, and which a step reads or frees."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable

from mmdeploy_llm.values.adapter_ref import AdapterRef


class AdapterBudget:
    """Accounting of the adapters in memory by key; the tensors are in the runner.

                    hold (read in this step)          last holder releases it
            absent -------------------------> HELD <---------------------> IDLE
               ^                                |            hold            |
               +------------ evicted, least recently used first -------------+   -> plan.unload

    A request holds its adapter while it runs. At most `max_adapters` are in memory, with
    `max_bytes` together. The scheduler is the only writer.
    """

    def __init__(self, *, max_adapters: int, max_bytes: int | None = None) -> None:
        """max_bytes: None for no bound."""
        self._max_adapters, self._max_bytes = max_adapters, max_bytes
        self._refs: dict[str, AdapterRef] = {}  # key -> ref, for all in memory
        self._holders: dict[str, dict[str, None]] = {}  # key -> request ids, never empty
        self._idle: OrderedDict[str, None] = OrderedDict()  # oldest first
        self._load: dict[str, AdapterRef] = {}
        self._unload: dict[str, None] = {}

    @property
    def has_unload(self) -> bool:
        """Whether the next plan frees an adapter."""
        return bool(self._unload)

    def can_hold(self, ref: AdapterRef) -> bool:
        """Whether a request with this adapter may start: it is in memory, or has room among those
        that running requests hold."""
        return ref.key in self._refs or self._has_room(ref, self._holders)

    def hold(self, request_id: str, ref: AdapterRef) -> None:
        """Holds an adapter for a request that starts; frees idle ones for it where need be."""
        assert self.can_hold(ref), "more adapters than memory allows"
        if ref.key not in self._refs:
            while not self._has_room(ref, self._refs):
                self._evict(next(iter(self._idle)))
            self._refs[ref.key] = self._load[ref.key] = ref
        self._idle.pop(ref.key, None)
        self._holders.setdefault(ref.key, {})[request_id] = None

    def release(self, request_id: str, ref: AdapterRef) -> None:
        """Releases the adapter of a request that stops running."""
        del self._holders[ref.key][request_id]
        if not self._holders[ref.key]:
            del self._holders[ref.key]
            self._idle[ref.key] = None

    def drop(self, key: str) -> None:
        """Frees an adapter, unless a request holds it. Where one needs it later, it is read
        again."""
        if key in self._idle:
            self._evict(key)

    def take_load(self) -> tuple[AdapterRef, ...]:
        """Returns the adapters that this step reads."""
        load, self._load = tuple(self._load.values()), {}
        return load

    def take_unload(self) -> tuple[str, ...]:
        """Returns the keys that were freed since the last call."""
        unload, self._unload = tuple(self._unload), {}
        return unload

    def unload_again(self, keys: Iterable[str]) -> None:
        """Repeats the `unload` of a plan that may not have been carried out."""
        self._unload.update((key, None) for key in keys if key not in self._refs)

    def _has_room(self, ref: AdapterRef, beside: Collection[str]) -> bool:
        num_bytes = ref.num_bytes + sum(self._refs[key].num_bytes for key in beside)
        has_memory = self._max_bytes is None or num_bytes <= self._max_bytes
        return has_memory and len(beside) < self._max_adapters

    def _evict(self, key: str) -> None:
        del self._idle[key], self._refs[key]
        if self._load.pop(key, None) is None:  # else it was never read
            self._unload[key] = None

    def check_integrity(self, needed: Iterable[tuple[str, AdapterRef | None]]) -> None:
        """Raises AssertionError unless all counts agree. needed: running requests, with theirs."""
        pairs = {(key, name) for key, names in self._holders.items() for name in names}
        assert pairs == {(ref.key, name) for name, ref in needed if ref is not None}
        assert self._refs.keys() == {*self._holders, *self._idle}, "held and idle are not all"
        assert not self._idle.keys() & self._holders, "adapters both idle and held"
        assert len(self._refs) <= self._max_adapters, "too many adapters"
