"""A compact set of item ids, and the selection of input lines that a run processes."""

from __future__ import annotations

import random
import re
from array import array
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from mmdeploy_llm.errors import ConfigError

FIRST_CAPACITY = 1024  # slots; always a power of two
MAX_LOAD = 0.6
ORDERS = ("finished", "input")
_SHARD = re.compile(r"(\d+)/(\d+)")


class IdSet:
    """A set of strings that stores a 64-bit hash of each: 13 to 27 bytes per string of any length.

    Among a million strings, the probability that any two collide is 3e-8.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * FIRST_CAPACITY))  # 0: empty
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, text: str) -> bool:
        return self._slots[self._slot(_hash(text))] != 0

    def add(self, text: str) -> bool:
        """Adds the text and returns whether it was new."""
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
        """Returns the slot that holds the value, or the empty slot where it belongs."""
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


class DoneItems:
    """The finished items of an output: their keys, and which version of its input each answers."""

    def __init__(self) -> None:
        self._keys, self._versions = IdSet(), IdSet()

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str, digest: str) -> None:
        """Adds a finished item. digest: of its input; "" of an item that could not be read."""
        self._keys.add(key)
        self._versions.add(f"{key}\0{digest}")

    def has(self, key: str, digest: str) -> bool:
        """Returns whether the item is finished and its input unchanged."""
        return f"{key}\0{digest}" in self._versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The lines of an input that a run processes: every `num_shards`-th of its first `limit`, or of
    `limit` random ones. Each line belongs to exactly one shard.

    shard: 1 to num_shards.
    seed: draws the random lines; None for the first ones. chosen: these lines, once they are drawn.
    only: ids of the items that are done; None for all.
    order: "finished": records are written as they finish; "input": in the order of the input.
    """

    shard: int = 1
    num_shards: int = 1
    limit: int | None = None
    seed: int | None = None
    chosen: frozenset[int] | None = None
    only: frozenset[str] | None = None
    order: str = ORDERS[0]

    def __post_init__(self) -> None:
        if not 1 <= self.shard <= self.num_shards:
            raise ConfigError(
                f"shard {self.shard}/{self.num_shards} does not exist; the first is "
                f"1/{max(self.num_shards, 1)}, the last {max(self.num_shards, 1)}/"
                f"{max(self.num_shards, 1)}"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if self.seed is not None and self.limit is None:
            raise ConfigError("random items need a number: give limit too, such as --limit 20")
        if self.only is not None and not self.only:
            raise ConfigError("only must name at least one id")
        if self.only is not None and self.limit is not None:
            raise ConfigError(
                "only names the items that are done, and limit counts those of the whole input; "
                "give one of them"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"order must be one of {', '.join(ORDERS)}, got {self.order[:40]!r}")

    @classmethod
    def parse(cls, shard: str | None, limit: int | None = None, **more: Any) -> Selection:
        """Parses "I/N": "2/8" is the second of eight shards. more: other fields. Raises
        ConfigError."""
        if shard is None:
            return cls(limit=limit, **more)
        match = _SHARD.fullmatch(shard.strip())
        if match is None:
            raise ConfigError(f"shard must be I/N, such as 1/4 to 4/4, got {shard[:40]!r}")
        return cls(shard=int(match[1]), num_shards=int(match[2]), limit=limit, **more)

    def over(self, num_lines: int) -> Selection:
        """Returns the selection of an input with so many lines: with the random ones drawn."""
        if self.seed is None or self.chosen is not None:
            return self
        drawn = random.Random(self.seed)
        chosen = frozenset(drawn.sample(range(1, num_lines + 1), min(num_lines, self.limit or 0)))
        return replace(self, chosen=chosen, limit=max(chosen, default=1))

    def takes(self, line: int) -> bool:
        """Returns whether the line, counted from 1, is selected."""
        is_drawn = self.chosen is None or line in self.chosen
        return is_drawn and not self.is_past(line) and (line - self.shard) % self.num_shards == 0

    def takes_id(self, *names: object) -> bool:
        """Returns whether an item with one of these names is selected."""
        return self.only is None or any(str(name) in self.only for name in names)

    def is_past(self, line: int) -> bool:
        """Returns whether this line, and so every later one, is beyond the limit."""
        return self.limit is not None and line > self.limit

    def count(self, num_lines: int) -> int:
        """Returns how many of an input's lines are selected."""
        if self.chosen is not None:
            found = sum(line <= num_lines and self.takes(line) for line in self.chosen)
        else:
            reach = num_lines if self.limit is None else min(num_lines, self.limit)
            found = len(range(self.shard, reach + 1, self.num_shards))
        return found if self.only is None else min(found, len(self.only))

    def words(self, num_lines: int) -> str:
        """Says which lines were drawn; "" where none were."""
        if self.chosen is None:
            return ""
        noun = "item" if len(self.chosen) == 1 else "items"
        return f"{len(self.chosen)} random {noun} of {num_lines}, drawn with the seed {self.seed}"
