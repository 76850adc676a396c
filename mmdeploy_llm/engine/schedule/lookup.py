"""Lookup: proposes the next tokens of a text from what followed the same words earlier in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

MAX_DRAFTS = 7  # tokens proposed at once: with the last known token they make 8 rows
NUM_CANDIDATES = 8  # earlier places that are compared
WEIGHTS = tuple(0.7**age for age in range(16))  # of the last tokens, the newest first
MIN_LIKENESS = 1.5  # below the weights of the two last tokens
TABLE_SIZE = 1 << 15  # places of pairs by hash: a bound of memory, whatever the text


class Lookup:
    """The prompt and output of one request, with the places of every pair of tokens.

        tokens   .. "name": "Ann", "age": 31 } { "name":
                     |---like---| ^^^^^ proposed  |---like---|

    Candidates are the latest places at which the last two tokens occurred before. The place of the
    previous proposal is one too, advanced by the new tokens: a copy in which one word differs is
    found again after that word. Chosen is the place before which most tokens equal the last ones of
    the text; newer tokens weigh more. Among equals the previous proposal wins, then the latest
    place. A token costs O(1) time and 8 bytes, the table 128 KiB. Writer: its Guesser.
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._last = array("i", bytes(4 * TABLE_SIZE))  # hash of a pair -> place after its last
        self._earlier = array("i", (0, 0))  # place -> the one before it of that hash; 0: none
        self._source = 0  # the place that was proposed last, moved on with the text; 0: none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the next tokens of the text."""
        tokens, last, earlier = self._tokens, self._last, self._earlier
        if self._source:
            self._source += len(token_ids)
        for token_id in token_ids:
            tokens.append(token_id)
            if len(tokens) > 1:
                at = (tokens[-2] * 40_503 + token_id) % TABLE_SIZE  # an odd factor mixes the ids
                earlier.append(last[at])
                last[at] = len(tokens)

    def proposal(self) -> tuple[int, ...]:
        """Returns up to MAX_DRAFTS tokens that may follow; () where no place is like the end.

        Fewer tokens than MAX_DRAFTS may lie between the place and the end: they are repeated then.
        """
        place, end = self._likest(), len(self._tokens)
        self._source = place
        if not place:
            return ()
        return tuple(self._tokens[place + at % (end - place)] for at in range(MAX_DRAFTS))

    def _likest(self) -> int:
        """Returns the place before which the tokens are most like the last ones; 0 if none is."""
        best, most = 0, MIN_LIKENESS
        newest_first = self._tokens[: -len(WEIGHTS) - 1 : -1]
        for place in self._candidates():
            likeness = self._likeness(place, newest_first)
            if likeness > most:
                best, most = place, likeness
        return best

    def _candidates(self) -> Iterator[int]:
        if self._source:
            yield self._source
        place = self._earlier[len(self._tokens)]
        for _ in range(NUM_CANDIDATES):
            if not place:
                return
            yield place
            place = self._earlier[place]

    def _likeness(self, place: int, newest_first: Sequence[int]) -> float:
        """Returns the sum of the weights of the last tokens that stand at the same distance before
        the place."""
        before = self._tokens[max(0, place - len(WEIGHTS)) : place]
        pairs = zip(reversed(before), newest_first, WEIGHTS, strict=False)
        return sum(weight for one, other, weight in pairs if one == other)
