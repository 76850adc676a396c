"""ByteCache: a cache that is bounded in bytes and makes items that are requested concurrently
once."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Generic, TypeVar

from mmdeploy_llm.errors import RequestTimeoutError
from mmdeploy_llm.values.deadline import Deadline

logger = logging.getLogger(__name__)

MAX_EVICTED = 2**16  # keys that are remembered
KEPT_AGAIN = 4  # of so many items made again one is kept, where all have no room

Item = TypeVar("Item")


class _NotOurs(Exception):
    """The request of another thread, which was making the item, ran out of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters of a cache. num_hits: lookups that made nothing. num_misses: items that were
    made."""

    num_hits: int
    num_misses: int
    num_bytes: int
    max_bytes: int


def add_stats(each: Iterable[Mapping[str, CacheStats]]) -> dict[str, CacheStats]:
    """Sums the statistics of several sets of caches, by name."""
    added: dict[str, CacheStats] = {}
    for name, stats in (item for one in each for item in one.items()):
        before = added.get(name, CacheStats(num_hits=0, num_misses=0, num_bytes=0, max_bytes=0))
        added[name] = CacheStats(
            num_hits=before.num_hits + stats.num_hits,
            num_misses=before.num_misses + stats.num_misses,
            num_bytes=before.num_bytes + stats.num_bytes,
            max_bytes=before.max_bytes + stats.max_bytes,
        )
    return added


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept(Generic[Item]):
    item: Item
    num_bytes: int
    made_at: float


class ByteCache(Generic[Item]):
    """Evicts the least recently used items first. Safe for use from several threads.

    An item that was evicted and is made again shows that the cache is too small. It grows then, as
    far as `most` allows. Beyond that most of such items are not kept: of a round of items that have
    no room together, each would be evicted just before it is asked for again.

    size_of: bytes of an item. max_age: seconds after which an item is made again; None: never.
    most: returns how many bytes there may be now, from those that are kept; None: max_bytes.
    """

    def __init__(
        self,
        max_bytes: int,
        size_of: Callable[[Item], int],
        max_age: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        most: Callable[[int], int] | None = None,
    ) -> None:
        self._max_bytes, self._told_bytes, self._most = max_bytes, max_bytes, most
        self._size_of = size_of
        self._max_age = max_age
        self._clock = clock
        self._num_bytes = self._num_hits = self._num_misses = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[str, _Kept[Item]] = OrderedDict()
        self._evicted: dict[str, None] = {}  # keys, the oldest first
        self._num_again = 0  # items made again that have no room
        self._pending: dict[str, Future[Item]] = {}

    @property
    def stats(self) -> CacheStats:
        """The current counters."""
        with self._lock:
            return CacheStats(
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_bytes=self._num_bytes,
                max_bytes=self._max_bytes,
            )

    def get_or_make(
        self, key: str, make: Callable[[], Item], deadline: Deadline | None = None
    ) -> Item:
        """Returns the item of `key`, calling `make` unless it is cached or another thread is making
        it.

        Raises what `make` raises, in every thread that waits for it; the next call tries again, and
        so does this one where the other's request ran out of time. Raises RequestTimeoutError when
        `deadline` passes while another thread makes it.
        """
        while True:
            try:
                return self._get_or_make(key, make, deadline)
            except _NotOurs:
                continue

    def _get_or_make(self, key: str, make: Callable[[], Item], deadline: Deadline | None) -> Item:
        with self._lock:
            kept = self._fresh(key)
            if kept is not None:
                self._items.move_to_end(key)
                self._num_hits += 1
                return kept.item
            future = self._pending.get(key)
            is_ours = future is None
            if future is None:
                future = self._pending[key] = Future()
            self._num_hits += not is_ours
            self._num_misses += is_ours
        if is_ours:
            return self._make(key, future, make)
        if not wait([future], None if deadline is None else max(0.0, deadline.left)).done:
            assert deadline is not None
            raise deadline.error("another request was preparing the same item")
        if isinstance(future.exception(), RequestTimeoutError):
            raise _NotOurs
        return future.result()

    def clear(self) -> None:
        """Removes all items; the counters of hits and misses stay."""
        with self._lock:
            self._items.clear()
            self._num_bytes = 0

    def _fresh(self, key: str) -> _Kept[Item] | None:
        """Returns the cached item; removes it and returns None when it is too old."""
        kept = self._items.get(key)
        if kept is None or self._max_age is None:
            return kept
        if self._clock() - kept.made_at <= self._max_age:
            return kept
        del self._items[key]
        self._num_bytes -= kept.num_bytes
        return None

    def _make(self, key: str, future: Future[Item], make: Callable[[], Item]) -> Item:
        try:
            item = make()
        except BaseException as error:
            with self._lock:
                del self._pending[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._pending[key]
            self._keep(key, item)
        future.set_result(item)
        return item

    def _keep(self, key: str, item: Item) -> None:
        size = self._size_of(item)
        if not self._has_room(key, size):
            self._evicted[key] = None
        else:
            self._evicted.pop(key, None)
            self._items[key] = _Kept(item=item, num_bytes=size, made_at=self._clock())
            self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            evicted, oldest = self._items.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            self._evicted[evicted] = None
        while len(self._evicted) > MAX_EVICTED:
            del self._evicted[next(iter(self._evicted))]

    def _has_room(self, key: str, size: int) -> bool:
        """Whether an item is kept, perhaps in place of others."""
        if key not in self._evicted:
            return size <= self._max_bytes
        self._grow(size)
        if self._num_bytes + size <= self._max_bytes:
            return True
        self._num_again += 1
        return size <= self._max_bytes and self._num_again % KEPT_AGAIN == 0

    def _grow(self, size: int) -> None:
        """Makes room for one more item, where there may be more."""
        wanted = self._num_bytes + size
        if self._most is None or wanted <= self._max_bytes:
            return
        self._max_bytes = max(self._max_bytes, min(wanted, self._most(self._num_bytes)))
        if self._max_bytes >= 2 * self._told_bytes:
            self._told_bytes = self._max_bytes
            logger.info(
                "media that were forgotten come again: %d MiB of prepared ones are kept now",
                self._max_bytes >> 20,
            )
