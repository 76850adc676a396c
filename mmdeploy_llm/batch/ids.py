"""Which items are known, in little memory, and which part of an input is this run's."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass
from hashlib import blake2b

from mmdeploy_llm.errors import ConfigError

FIRST_CAPACITY = 1024  # slots; always a power of two
MAX_LOAD = 0.6
_SHARD = re.compile(r"(\d+)/(\d+)")


class IdSet:
    """A set of texts of which only 64 bits each are kept: 13 to 27 bytes for one, however long it
    is. Two of a million texts are taken for one another with a probability of 3e-8.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * FIRST_CAPACITY))  # 0: empty
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, text: str) -> bool:
        return self._slots[self._slot(_hash(text))] != 0

    def add(self, text: str) -> bool:
        """Puts the text in; whether it was new."""
        value = _hash(text)
        slot = self._slot(value)
        if self._slots[slot]:
            return False
        self._slots[slot] = value
        self._size += 1
        if self._size > MAX_LOAD * len(self._slots):
            self._grow()
        return True

    def _slot(self, value: int) -> int:
        """Where the value is, or the empty slot where it belongs."""
        slots, mask = self._slots, len(self._slots) - 1
        slot = value & mask
        while slots[slot] not in (0, value):
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for value in old:
            if value:
                self._slots[self._slot(value)] = value


def _hash(text: str) -> int:
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The part of an input that a run takes: every `num_shards`-th of its first `limit` lines.

    Depends on the line number alone, so the shards of one input share its lines out exactly.
    shard: 1 to num_shards.
    """

    shard: int = 1
    num_shards: int = 1
    limit: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.shard <= self.num_shards:
            raise ConfigError(
                f"shard {self.shard}/{self.num_shards} does not exist; the first is "
                f"1/{max(self.num_shards, 1)}, the last {max(self.num_shards, 1)}/"
                f"{max(self.num_shards, 1)}"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")

    @classmethod
    def parse(cls, shard: str | None, limit: int | None = None) -> Selection:
        """Reads "2/8", the second of eight. Raises ConfigError."""
        if shard is None:
            return cls(limit=limit)
        match = _SHARD.fullmatch(shard.strip())
        if match is None:
            raise ConfigError(f"shard must be I/N, such as 1/4 to 4/4, got {shard[:40]!r}")
        return cls(shard=int(match[1]), num_shards=int(match[2]), limit=limit)

    def takes(self, line: int) -> bool:
        """Whether the line, counted from 1, is in this part."""
        return not self.is_past(line) and (line - self.shard) % self.num_shards == 0

    def is_past(self, line: int) -> bool:
        """Whether this and all later lines are beyond the limit."""
        return self.limit is not None and line > self.limit

    def count(self, num_lines: int) -> int:
        """How many of an input's lines are in this part."""
        reach = num_lines if self.limit is None else min(num_lines, self.limit)
        return len(range(self.shard, reach + 1, self.num_shards))
