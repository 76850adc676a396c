"""GrammarMatcher: the state of one text in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .token_texts import BITS, Words, ban_ids


class GrammarMatcher:
    """A text in its grammar. Its Guide is the only writer.

    forget: called when the grammar exceeds a limit, which it shares with others of its text.
    """

    def __init__(
        self,
        matcher: Any,
        eos_token_ids: Sequence[int],
        forget: Callable[[], None],
        encode: Callable[[str], list[int]],
    ) -> None:
        self._matcher = matcher
        self._eos_token_ids = tuple(eos_token_ids)
        self._forget = forget
        self._encode = encode

    def accept(self, token_id: int) -> None:
        """Advances by the next token, which `words` allowed. Ignores tokens after the grammar's
        end."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)

    def try_accept(self, token_id: int) -> bool:
        """Advances by a token if the grammar allows it; returns whether it did."""
        is_allowed = not self._matcher.is_stopped() and (
            self._matcher.validate_tokens([token_id]) == 1
        )
        return is_allowed and bool(self._matcher.consume_token(token_id))

    def restart(self) -> None:
        """Returns to the beginning of the grammar."""
        self._matcher.reset()

    def allows_text(self, text: str) -> bool:
        """Whether the grammar allows that a text comes next."""
        ids = self._encode(text)
        return not self._matcher.is_stopped() and self._matcher.validate_tokens(ids) == len(ids)

    def accept_text(self, text: str) -> None:
        """Advances by a text. One that the grammar does not allow ends with no token allowed."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(self._encode(text))

    def matches(self, text: str) -> bool:
        """Whether the grammar allows exactly this text."""
        return self.allows_text(text) and self._ends_after(text)

    def words(self, size: int) -> Words:
        """Returns which tokens are allowed next, as words of bits; only end-of-sequence tokens
        after the grammar's end, and none after it became too complex for the limits of a step."""
        words = np.zeros(size, dtype=np.uint32)
        if not self._matcher.is_stopped():
            found = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[:size]
            words[: len(found)] = found
        elif not self._matcher.is_error():
            for token_id in self._eos_token_ids:
                words[token_id // BITS] |= np.uint32(1 << token_id % BITS)
        if self._matcher.is_error():
            words[:] = 0
            self._forget()
        return words

    def is_only_end(self, words: Words) -> bool:
        """Whether the end of sequence is allowed next, and nothing else."""
        rest = words.copy()
        ban_ids(rest, self._eos_token_ids)
        return bool(words.any() and not rest.any())

    def _ends_after(self, text: str) -> bool:
        copied = self._matcher.deep_copy()
        copied.consume_tokens(self._encode(text))
        return bool(copied.is_accepting() and not copied.is_error())
