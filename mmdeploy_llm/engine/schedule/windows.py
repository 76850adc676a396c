"""WindowBlocks: the KV cache blocks of the layers with a window, and which request holds them."""

from __future__ import annotations

from .blocks import BlockPool
from .limits import SchedulerConfig
from .state import RequestState, WindowTable


def blocks_of_window(window: int, block_size: int) -> int:
    """Returns how many blocks a decoding request holds at most: those that the next token and the
    one after it attend to, and one more.

        window 4, blocks of 2     | . x | x x | x x |     window + 1 tokens of both

    At most ceil(window / block_size) + 1 blocks hold some of these. One more is held until the step
    whose tokens have left it is committed.
    """
    return -(-window // block_size) + 2


class WindowBlocks:
    """A pool of blocks for the layers with a window. The scheduler is the only writer.

        tokens   0 . . . . . . . . . . . . . . . . . . . . . . next
        table    [ returned | returned | held | held | held  ]
                                       <--- window ----->

    A step takes the blocks of its own tokens. A committed step gives those back that the next token
    does not attend to; with a key they stay cached, as in any BlockPool. A request is admitted only
    while the pool is large enough for the windows of all that run, so that no step lacks blocks
    here and nobody is preempted for them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.window is not None, "a model without windows has no such blocks"
        self._window, self._config = config.window, config
        self.pool = BlockPool(
            num_blocks=config.num_window_blocks,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_idle_blocks=config.max_idle_window_blocks,
        )
        self._per_request = blocks_of_window(self._window, config.block_size)
        self._per_step = config.num_blocks_for(config.max_num_batched_tokens)
        self._num_reserved = 0  # of all running requests: for their windows
        self._num_beyond = 0  # what they could hold beyond that, if a step computed them whole

    def can_start(self, state: RequestState) -> bool:
        """Whether the pool is large enough for one more request."""
        reserved, beyond = self._needs(state)
        # All decode within their windows; one step takes more blocks for the tokens of prompts, at
        # most as many as it has tokens for, and as its requests can hold.
        step = min(self._per_step, self._num_beyond + beyond)
        return self._num_reserved + reserved + step <= self.pool.num_blocks

    def match(self, state: RequestState, count: int) -> int:
        """Returns the largest number of blocks, at most count, after which a request can start:
        those in its last window are cached."""
        keys = state.keys
        while count:
            needed = range(self._first_visible(count * self._config.block_size), count)
            # Without block i no request can start after more than i blocks, up to this count.
            missing = (i for i in needed if self.pool.find(keys.key(i)) is None)
            if (first := next(missing, None)) is None:
                break
            count = first
        return count

    def start(self, state: RequestState, count: int) -> None:
        """Starts a request from the cached blocks in the last window before block `count`."""
        first = self._first_visible(count * self._config.block_size)
        found = [self.pool.find(state.keys.key(index)) for index in range(first, count)]
        matched = [block for block in found if block is not None]
        assert len(matched) == len(found), "a match ends where the window is cached"
        ids = [0] * first + self.pool.allocate(0, matched)
        state.window = WindowTable(ids=ids, num_returned=first)
        self._reserve(state, 1)

    def plan(self, state: RequestState, end: int) -> tuple[int, ...]:
        """Takes the blocks that a step up to token `end` needs. Returns what is new for the
        runner."""
        table = state.window
        num_new = self._config.num_blocks_for(end) - len(table.ids)
        table.ids += self.pool.allocate(max(0, num_new))
        new = tuple(table.ids[table.num_known :])
        table.num_known = len(table.ids)
        return new

    def advance(self, state: RequestState, begin: int, end: int) -> None:
        """Offers blocks begin .. end for sharing, which are full and computed, and gives back those
        that no token attends to any more."""
        table = state.window
        # Drafts that were right may have given blocks back before they were offered.
        self.pool.register(table.ids, state.keys, max(begin, table.num_returned), end)
        first = self._first_visible(state.request.num_computed_tokens)
        if first > table.num_returned:
            returned = table.ids[table.num_returned : first]
            self.pool.free(returned[::-1])  # the first ones are evicted first
            table.num_returned = first

    def leave(self, state: RequestState) -> None:
        """Gives back all blocks of a running request."""
        self.pool.free(state.window.held)
        state.window = WindowTable()
        self._reserve(state, -1)

    def _first_visible(self, token: int) -> int:
        """Returns the first block that this token attends to: the one of its window's first token,
        token + 1 - window."""
        return max(0, token + 1 - self._window) // self._config.block_size

    def _needs(self, state: RequestState) -> tuple[int, int]:
        """Returns how many blocks the request holds at most while it decodes, and how many more
        when one step computes all of it."""
        longest = self._config.num_blocks_for(state.max_num_tokens)
        reserved = min(longest, self._per_request)
        return reserved, longest - reserved

    def _reserve(self, state: RequestState, sign: int) -> None:
        reserved, beyond = self._needs(state)
        self._num_reserved += sign * reserved
        self._num_beyond += sign * beyond
