"""The cache of processed media: how much memory it takes."""

from __future__ import annotations

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.system.portable.machine import free_ram

from .cache import ByteCache
from .keys import num_bytes

FIRST_BYTES = 64 * 2**20  # enough for items that come again soon
MOST_BYTES = 2 * 2**30
RAM_SHARE = 8


def processed_cache(max_bytes: int | None) -> ByteCache[MediaInput]:
    """Returns a cache of at most so many bytes; None: it grows where items come again that it had
    to evict, up to an eighth of the RAM that is free without it."""
    if max_bytes is not None:
        return ByteCache(max_bytes, num_bytes)
    return ByteCache(FIRST_BYTES, num_bytes, most=most_bytes)


def most_bytes(kept: int) -> int:
    """Returns how many bytes may be kept now. kept: those that are."""
    return min(MOST_BYTES, (kept + free_ram()) // RAM_SHARE)
