"""Lookup: proposes the next tokens of a text from what followed the same words earlier in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_DRAFTS = 7  # tokens proposed at once: with the last known token they make 8 rows
NUM_CANDIDATES = 8  # earlier places that are compared
MAX_MATCH = 16  # tokens compared at each


class Lookup:
    """The prompt and output of one request, with the places of every pair of tokens.

        tokens   .. "name": "Ann", "age": 31 } { "name":
                     |--match---| ^^^^^ proposed  |--match---|

    Of the last places where the two last tokens stood before, the one with the longest match before
    it wins, and of equals the latest. Each token costs O(1). Writer: its Guesser.
    """

    def __init__(self) -> None:
        self._tokens: array[int] = array("q")
        self._last: dict[int, int] = {}  # pair of tokens -> the place after its last occurrence
        self._earlier: array[int] = array("q", (0, 0))  # place -> the one before it; 0: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the next tokens of the text."""
        tokens, last, earlier = self._tokens, self._last, self._earlier
        for token_id in token_ids:
            tokens.append(token_id)
            if len(tokens) > 1:
                pair = tokens[-2] << 32 | token_id
                earlier.append(last.get(pair, 0))
                last[pair] = len(tokens)

    def proposal(self) -> tuple[int, ...]:
        """Returns up to MAX_DRAFTS tokens that may follow; () where the two last tokens are new.

        Where the match reaches into its own continuation, the text is expected to go on in circles.
        """
        place, end = self._longest_match(), len(self._tokens)
        if not place:
            return ()
        return tuple(self._tokens[place + at % (end - place)] for at in range(MAX_DRAFTS))

    def _longest_match(self) -> int:
        tokens, end = self._tokens, len(self._tokens)
        place, best, longest = self._earlier[end], 0, 0
        for _ in range(NUM_CANDIDATES):
            if not place:
                break
            length = 2
            while length < min(MAX_MATCH, place) and (
                tokens[place - 1 - length] == tokens[end - 1 - length]
            ):
                length += 1
            if length > longest:
                best, longest = place, length
            if length == MAX_MATCH:
                break
            place = self._earlier[place]
        return best
