"""BlockPool: which KV cache blocks are in use, by how many requests, and what free ones hold."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from .prefix import PrefixKeys


class BlockPool:
    """All KV cache blocks, by index. The scheduler is the only writer.

    The life of a block:

                     allocate                      register (full and computed)
        EMPTY ------------------> USED, no key ---------------------------------> USED, with key
          ^                         |                                             |  ^   |
          |        free, last user  |                        match + allocate:    |  |   | free,
          +-------------------------+                        one more user        +--+   | last user
          |                                                                              v
          +--- then allocated again <--- evicted, least recently used first -- IDLE, content kept
                                                                                  |
                                         match + allocate: USED again <-----------+

    A block in use belongs to one request or, when it has a key, to all requests that begin with the
    same content. Idle blocks count as free. Above `max_idle_blocks` (None: no limit) the oldest
    become empty. Empty blocks are used again last in, first out, so that memory that was never
    touched stays untouched. Every operation costs O(1) for each block it touches.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        max_idle_blocks: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._is_caching = enable_prefix_caching
        self._max_idle = max_idle_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low indices are used first
        self._idle: OrderedDict[int, None] = OrderedDict()  # in order of release and eviction
        self._num_users = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, those with cached content included."""
        return len(self._empty) + len(self._idle)

    def match(self, keys: PrefixKeys, num_tokens: int) -> list[int]:
        """Returns the blocks with the longest cached prefix of a request of `num_tokens` tokens.

        At least one token is left to compute, because the logits of the last one are needed.
        """
        blocks: list[int] = []
        if not self._is_caching:
            return blocks
        for index in range((num_tokens - 1) // self.block_size):
            block = self.find(keys.key(index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, key: bytes) -> int | None:
        """Returns the block with this content; None if none has it."""
        return self._block_of.get(key)

    def can_allocate(self, num_new: int, matched: Sequence[int] = ()) -> bool:
        """Whether `allocate` with the same arguments has enough blocks."""
        num_revived = sum(self._num_users[block] == 0 for block in matched)
        return num_new + num_revived <= self.num_free

    def allocate(self, num_new: int, matched: Sequence[int] = ()) -> list[int]:
        """Returns a block table: `matched` with one more user each, then `num_new` unshared
        blocks."""
        assert self.can_allocate(num_new, matched), f"no {num_new} of {self.num_free} free blocks"
        for block in matched:  # before any eviction, so that none of these is evicted
            self._idle.pop(block, None)
            self._num_users[block] += 1
        return [*matched, *(self._take() for _ in range(num_new))]

    def register(self, table: Sequence[int], keys: PrefixKeys, start: int, end: int) -> None:
        """Offers blocks `table[start:end]`, which are full and computed, for sharing.

        Content that another block already holds under the same key stays with that block.
        """
        if not self._is_caching:
            return
        for index in range(start, end):
            key, block = keys.key(index), table[index]
            if key not in self._block_of:
                self._block_of[key] = block
                self._key_of[block] = key

    def free(self, table: Sequence[int]) -> None:
        """Removes one user from each block of `table`; content with a key stays until eviction.

        The end of the table enters the eviction queue first: a prefix is worth more than what
        follows it, and what follows a lost prefix can never be matched.
        """
        for block in reversed(table):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._empty.append(block)
        while self._max_idle is not None and len(self._idle) > self._max_idle:
            self._empty.append(self._evict())

    def _take(self) -> int:
        block = self._empty.pop() if self._empty else self._evict()
        self._num_users[block] = 1
        return block

    def _evict(self) -> int:
        """Returns the block that was idle longest, without its content."""
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless the counts agree with `tables`, every request's block
        table."""
        users: Counter[int] = Counter()
        for table in tables:
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            users.update(table)
        for block in range(self.num_blocks):
            assert self._num_users[block] == users[block], f"block {block}: wrong number of users"
            assert users[block] <= 1 or block in self._key_of, (
                f"block {block}: shared without a key"
            )
        free = [*self._empty, *self._idle]
        assert len(set(free)) == len(free) == self.num_blocks - len(users), "lost or doubled blocks"
        assert not set(free) & set(users), "blocks both free and in use"
        assert all(block in self._key_of for block in self._idle), "idle block without a key"
        assert self._max_idle is None or len(self._idle) <= self._max_idle, "too many idle blocks"
        assert not any(block in self._key_of for block in self._empty), "empty block with a key"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "keys differ"
