"""A cache of processed media, bounded in bytes; equal items that come at once are made once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from mmdeploy_llm.request import MediaInput


class MediaCache:
    """Least recently used items go first. Safe for use from several threads.

    num_hits counts answers without work of their own, num_misses those that were made.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._lock = threading.Lock()
        self._items: OrderedDict[str, MediaInput] = OrderedDict()
        self._pending: dict[str, Future[MediaInput]] = {}

    def get_or_make(self, key: str, make: Callable[[], MediaInput]) -> MediaInput:
        """The item of `key`; `make` is called unless it is there or another thread makes it now.

        Raises what `make` raises, in every thread that waits for it; the next call tries again.
        """
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
                self.num_hits += 1
                return found
            future = self._pending.get(key)
            is_ours = future is None
            if future is None:
                future = self._pending[key] = Future()
            self.num_hits += not is_ours
            self.num_misses += is_ours
        return self._make(key, future, make) if is_ours else future.result()

    def _make(
        self, key: str, future: Future[MediaInput], make: Callable[[], MediaInput]
    ) -> MediaInput:
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

    def _keep(self, key: str, item: MediaInput) -> None:
        size = num_bytes(item)
        if size > self.max_bytes:
            return
        self._items[key] = item
        self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            _, oldest = self._items.popitem(last=False)
            self.num_bytes -= num_bytes(oldest)


def num_bytes(item: MediaInput) -> int:
    """Bytes of an item's tensors."""
    return sum(tensor.nbytes for tensor in item.tensors.values())
