"""Trackers: record what the rules need of a sequence: token counts, n-grams, bad words, the length
of the thinking.

Each is built from the prompt and receives every token after it, so that a request that starts again
after a preemption is in exactly the same state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """How often each token that occurs in one request was generated.

    Holds unique ids rather than a [slots, V] table: a request has hundreds of different tokens, and
    penalties touch only these instead of the vocabulary. Written by its SlotState only.
    """

    def __init__(self, prompt_token_ids: Sequence[int], vocab_size: int) -> None:
        prompt = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        prompt = prompt[(prompt >= 0) & (prompt < vocab_size)]
        self._index = {token_id: index for index, token_id in enumerate(prompt.tolist())}
        self._ids = prompt
        self._counts = np.zeros(len(prompt), dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens, in no particular order."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` was generated; 0 if it occurs in the prompt only."""
        return self._counts[: len(self._index)]

    def append(self, token_id: int) -> None:
        """Counts a generated token."""
        index = self._index.setdefault(token_id, len(self._index))
        if index == len(self._ids):
            self._grow()
        self._ids[index] = token_id
        self._counts[index] += 1

    def _grow(self) -> None:
        extra = max(64, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(extra, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(extra, dtype=np.float32)])


class NGrams:
    """Knows which tokens would repeat an n-gram of the sequence. Written by its SlotState only.

    window: only n-grams that lie in the last so many tokens count; None: all. may_repeat: tokens
    that may repeat one. A step costs one look-up, whatever the length of the sequence.
    """

    def __init__(
        self,
        size: int,
        prompt_token_ids: Iterable[int] = (),
        *,
        window: int | None = None,
        may_repeat: Collection[int] = (),
    ) -> None:
        self._size, self._window = size, window
        self._may_repeat = frozenset(may_repeat)
        self._num_tokens = 0
        self._tail: deque[int] = deque(maxlen=size - 1)
        # First tokens -> last token -> where the newest such n-gram begins.
        self._next: dict[tuple[int, ...], dict[int, int]] = {}
        self._oldest: deque[tuple[tuple[int, ...], int, int]] = deque()  # with a window only
        for token_id in prompt_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Records the next token of the sequence."""
        self._num_tokens += 1
        if len(self._tail) == self._size - 1:
            first, begin = tuple(self._tail), self._num_tokens - self._size
            self._next.setdefault(first, {})[token_id] = begin
            if self._window is not None:
                self._oldest.append((first, token_id, begin))
        self._tail.append(token_id)
        self._forget()

    def banned(self) -> Collection[int]:
        """Returns the ids that would repeat an n-gram."""
        if len(self._tail) < self._size - 1:
            return ()
        found = self._next.get(tuple(self._tail), {})
        return found.keys() - self._may_repeat if self._may_repeat else found.keys()

    def _forget(self) -> None:
        """Forgets n-grams that begin before the window."""
        if self._window is None:
            return
        begin = self._num_tokens - self._window
        while self._oldest and self._oldest[0][2] < begin:
            first, token_id, place = self._oldest.popleft()
            if self._next[first][token_id] == place:  # no newer one
                del self._next[first][token_id]
                if not self._next[first]:
                    del self._next[first]


class BadSequences:
    """Knows which tokens would complete a banned sequence of two or more tokens. Written by its
    SlotState only."""

    def __init__(
        self, sequences: Sequence[tuple[int, ...]], prompt_token_ids: Sequence[int]
    ) -> None:
        self._after: dict[int, list[tuple[int, ...]]] = {}  # last id but one -> sequences
        for ids in sequences:
            self._after.setdefault(ids[-2], []).append(ids)
        length = max(map(len, sequences)) - 1
        self._tail = deque(prompt_token_ids[-length:], maxlen=length)

    def append(self, token_id: int) -> None:
        """Records the next token of the sequence."""
        self._tail.append(token_id)

    def banned(self) -> set[int]:
        """Returns the last ids of the sequences whose other ids were just generated."""
        tail = tuple(self._tail)
        begun = self._after.get(tail[-1], ()) if tail else ()
        return {ids[-1] for ids in begun if tail[1 - len(ids) :] == ids[:-1]}


class ThinkingCap:
    """Ends the thinking after `limit` tokens by forcing `end_ids`, one id per step. Written by its
    SlotState only.

    The thinking starts with the first generated token and ends with all of `end_ids`, generated or
    forced; a prefix of them that was generated right before the limit is completed.
    """

    def __init__(self, end_ids: Sequence[int], limit: int) -> None:
        self._end_ids = tuple(end_ids)
        self._limit = limit
        self._num_tokens = 0
        self._tail: deque[int] = deque(maxlen=len(end_ids))
        self.is_closed = False

    def append(self, token_id: int) -> None:
        """Records the next token of the output."""
        if self.is_closed:
            return
        self._num_tokens += 1
        self._tail.append(token_id)
        self.is_closed = tuple(self._tail) == self._end_ids

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if any token may."""
        if self.is_closed or self._num_tokens < self._limit:
            return None
        tail = tuple(self._tail)
        lengths = range(min(len(tail), len(self._end_ids) - 1), 0, -1)
        done = next((n for n in lengths if tail[-n:] == self._end_ids[:n]), 0)
        return self._end_ids[done]
