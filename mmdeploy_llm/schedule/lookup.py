"""Lookup: proposes the next tokens of a text from what followed the same words earlier in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_DRAFTS = 7  # tokens proposed at once: with the last known token they make 8 rows
NUM_CANDIDATES = 8  # earlier places that are compared
MIN_MATCH = 2  # tokens before a place that equal the last ones
MAX_MATCH = 16  # tokens compared at each
TABLE_SIZE = 1 << 15  # places of pairs by hash: a bound of memory, whatever the text


class Lookup:
    """The prompt and output of one request, with the places of every pair of tokens.

        tokens   .. "name": "Ann", "age": 31 } { "name":
                     |--match---| ^^^^^ proposed  |--match---|

    Of the last places where the two last tokens stood before, the one with the longest match before
    it wins, and of equals the latest. A token costs O(1) time and 8 bytes, the table 128 KiB.
    Writer: its Guesser.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._last = array("i", bytes(4 * TABLE_SIZE))  # hash of a pair -> place after its last
        self._earlier = array("i", (0, 0))  # place -> the one before it of that hash; 0: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the next tokens of the text."""
        tokens, last, earlier = self._tokens, self._last, self._earlier
        for token_id in token_ids:
            tokens.append(token_id)
            if len(tokens) > 1:
                at = (tokens[-2] * 40_503 + token_id) % TABLE_SIZE  # an odd factor mixes the ids
                earlier.append(last[at])
                last[at] = len(tokens)

    def proposal(self) -> tuple[int, ...]:
        """Returns up to MAX_DRAFTS tokens that may follow; () where the two last tokens are new.

        Where the match reaches into its own continuation, the text is expected to go on in circles.
        """
        place, end = self._longest_match(), len(self._tokens)
        if not place:
            return ()
        return tuple(self._tokens[place + at % (end - place)] for at in range(MAX_DRAFTS))

    def _longest_match(self) -> int:
        """Returns the place after the longest match; 0 where there is none."""
        tokens, end = self._tokens, len(self._tokens)
        place, best, longest = self._earlier[end], 0, MIN_MATCH - 1
        for _ in range(NUM_CANDIDATES):
            if not place or longest == MAX_MATCH:
                break
            length, most = 0, min(MAX_MATCH, place)
            while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = self._earlier[place]
        return best
