"""StateRows: the rows of the state tensors, which request holds them, and what kept ones hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from mmdeploy_llm.values.plan import NUM_FIXED, ZERO_ROW

from .state import RequestState


class StateRows:
    """All rows of the states, by index. The scheduler is the only writer.

        allocate           keep (under the key of the tokens so far)
    FREE ------> IN USE ------------------------------------------> IN USE, with key
     ^             |                                                  |  ^
     |   release   |                                        last user |  | find + share
     +-------------+                                          leaves  v  |
     +------------------- evicted, least recently used first -------- IDLE

    A step reads one row of a request and writes another, so that a step that failed can be
    computed again. A row with a key is never written again; one that a step of one token has
    written gets none. At most `max_idle` rows are idle.
    """

    def __init__(self, *, num_rows: int, max_idle: int, block_size: int) -> None:
        """num_rows: with the two fixed ones. block_size: of the KV cache, in tokens."""
        self._block_size = block_size
        self.num_rows = num_rows
        self._max_idle = max_idle
        self._free = list(range(num_rows - 1, NUM_FIXED - 1, -1))  # a stack: low ones first
        self._num_users: dict[int, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._row_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Rows that can be allocated, idle ones included."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """Returns a row with one user. The caller ensures that one is free."""
        row = self._free.pop() if self._free else self._evict()
        self._num_users[row] = 1
        return row

    def find(self, key: bytes) -> int | None:
        """Returns the row that holds the state after these tokens; None if none does."""
        return self._row_of.get(key)

    def share(self, row: int) -> None:
        """Adds a user to a row with a key."""
        self._idle.pop(row, None)
        self._num_users[row] = self._num_users.get(row, 0) + 1

    def keep(self, row: int, key: bytes) -> None:
        """Keeps the content of a row in use for later requests, unless another row holds it."""
        if self._max_idle and key not in self._row_of:
            self._row_of[key] = row
            self._key_of[row] = key

    def release(self, row: int) -> None:
        """Removes a user of a row; of the zero row that changes nothing."""
        if row == ZERO_ROW:
            return
        self._num_users[row] -= 1
        if self._num_users[row]:
            return
        del self._num_users[row]
        if row not in self._key_of:
            self._free.append(row)
            return
        self._idle[row] = None
        if len(self._idle) > self._max_idle:
            self._free.append(self._evict())

    # The rows of a request: one holds its state, and each planned step will write another.

    def match(self, state: RequestState, blocks: list[int]) -> list[int]:
        """Returns the first of the cached blocks of a request, up to the last one after which a
        state is kept. Marks the end of all of them, so that a state will be kept there too."""
        count = len(blocks)
        while count and self.find(state.keys.key(count - 1)) is None:
            count -= 1
        state.shared_end = max(state.shared_end, len(blocks) * self._block_size)
        return blocks[:count]

    def start(self, state: RequestState, num_blocks: int) -> None:
        """Starts a request from the state that is kept for its first num_blocks blocks."""
        row = self.find(state.keys.key(num_blocks - 1))
        assert row is not None, "a match ends at a kept state"
        self.share(row)
        state.state_row = row

    def plan(self, state: RequestState) -> tuple[int, int]:
        """Returns ScheduledTokens.state_rows of a request's next step; allocates the second."""
        read = state.planned_rows[-1] if state.planned_rows else state.state_row
        state.planned_rows.append(self.allocate())
        return read, state.planned_rows[-1]

    def commit(self, state: RequestState, num_tokens: int) -> None:
        """Moves a request on to the row that a committed step of num_tokens has written, and keeps
        it where a block of the prompt ends; not after one token, whose matrix the next step may
        change, see layers.states.places."""
        self.release(state.state_row)
        state.state_row = state.planned_rows.pop(0)
        end = state.request.num_computed_tokens
        if (
            num_tokens > 1
            and end % self._block_size == 0
            and end <= len(state.request.prompt_token_ids)
        ):
            self.keep(state.state_row, state.keys.key(end // self._block_size - 1))

    def reject(self, state: RequestState) -> None:
        """Leaves a request at its row where a committed step has written the state after tokens
        that were not accepted."""
        self.release(state.planned_rows.pop(0))

    def leave(self, state: RequestState) -> None:
        """Releases all rows of a request."""
        for row in (state.state_row, *state.planned_rows):
            self.release(row)
        state.state_row, state.planned_rows = ZERO_ROW, []

    def _evict(self) -> int:
        """Returns the row that was idle longest, without its content."""
        row, _ = self._idle.popitem(last=False)
        del self._row_of[self._key_of.pop(row)]
        return row

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raises AssertionError unless the counts agree with `held`, the rows of all requests, one
        entry for each use."""
        users: dict[int, int] = {}
        for row in held:
            if row != ZERO_ROW:
                users[row] = users.get(row, 0) + 1
        assert users == self._num_users, f"wrong users of rows: {users}, {self._num_users}"
        assert all(count == 1 or row in self._key_of for row, count in users.items())
        free = [*self._free, *self._idle]
        assert len(set(free)) == len(free) == self.num_rows - NUM_FIXED - len(users), "lost rows"
        assert not set(free) & set(users), "rows both free and in use"
        assert set(self._idle) <= set(self._key_of), "an idle row without a key"
        assert len(self._idle) <= self._max_idle, "too many idle rows"
        assert {key: row for row, key in self._key_of.items()} == self._row_of, "keys differ"
