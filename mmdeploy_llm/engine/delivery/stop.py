"""Finds stop strings in text that arrives in pieces, and stop sequences of token ids."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first, however the text is split.

    Of two that end at the same character the longer one wins. Text that may still become a stop
    string is held back. Text after a match is dropped. Writer: the pipeline that owns it.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = tuple(stops)
        self._is_included = is_included
        self._last = frozenset(stop[-1:] for stop in stops)
        self._open = _lengths(stops)
        self._held = ""
        self.found: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether one is found."""
        return self.found is not None

    def feed(self, text: str, *, can_stop: bool = True) -> str:
        """Returns the settled text; on a match, the text before it (plus the match, if included).

        can_stop=False: a stop string that this text completes counts as plain text.
        """
        if self.is_stopped:
            return ""
        num_held = len(self._held)
        text = self._held + text
        if can_stop:
            match = self._first_match(text, num_held)
            if match is not None:
                self.found, self._held = text[slice(*match)], ""
                return text[: match[1] if self._is_included else match[0]]
        num_settled = len(text) - self._num_open(text)
        self._held = text[num_settled:]
        return text[:num_settled]

    def finish(self) -> str:
        """Returns the text that was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_held: int) -> tuple[int, int] | None:
        """Returns start and end of the stop string that ends first past the `num_held`
        characters."""
        best: tuple[int, int] | None = None
        if self._last.isdisjoint(text[num_held:]):
            return best
        for stop in self._stops:
            start = text.find(stop, max(0, num_held + 1 - len(stop)))
            end = start + len(stop)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = (start, end)
        return best

    def _num_open(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a stop string."""
        for length in self._open.get(text[-1:], ()):
            end = text[-length:]
            if length == len(end) and any(
                len(stop) > length and stop.startswith(end) for stop in self._stops
            ):
                return length
        return 0


def _lengths(stops: Sequence[str]) -> dict[str, list[int]]:
    """Returns the lengths of proper beginnings of stop strings by their last character, the longest
    first: most texts end with a character that ends none of them."""
    found: dict[str, set[int]] = {}
    for stop in stops:
        for length, last in enumerate(stop[:-1], 1):
            found.setdefault(last, set()).add(length)
    return {last: sorted(own, reverse=True) for last, own in found.items()}


class StopSequences:
    """Finds the sequence of token ids that is complete first.

    Of two that end at the same token the longer one wins. Ids that may still become a sequence are
    held back. Ids after a match are dropped. Writer: the pipeline that owns it.
    """

    def __init__(
        self, sequences: Sequence[Sequence[int]], *, is_included: bool, min_tokens: int
    ) -> None:
        """min_tokens: a sequence that ends before this many tokens counts as plain ids."""
        self._sequences = sorted(map(tuple, sequences), key=len, reverse=True)
        self._is_included = is_included
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held: tuple[int, ...] = ()
        self.found: tuple[int, ...] | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether one is found."""
        return self.found is not None

    def feed(self, token_id: int) -> tuple[int, ...]:
        """Returns the ids that are settled; on a match, those before it (plus the match, if
        included)."""
        if self.is_stopped:
            return ()
        self._num_tokens += 1
        ids = (*self._held, token_id)
        match = next((one for one in self._sequences if ids[-len(one) :] == one), None)
        if match is not None and self._num_tokens >= self._min_tokens:
            self.found, self._held = match, ()
            return ids if self._is_included else ids[: len(ids) - len(match)]
        num_settled = next(n for n in range(len(ids) + 1) if self._is_open(ids[n:]))
        self._held = ids[num_settled:]
        return ids[:num_settled]

    def end_with(self, token_id: int) -> tuple[int, ...]:
        """Returns the ids that are settled when `token_id` ends the request. It is not among them,
        unless it completes a sequence that is included."""
        settled = self.feed(token_id)
        return settled if self.is_stopped else (*settled, *self.finish())[:-1]

    def finish(self) -> tuple[int, ...]:
        """Returns the ids that were held back and did not become a sequence."""
        held, self._held = self._held, ()
        return held

    def _is_open(self, ids: tuple[int, ...]) -> bool:
        """Whether `ids` begin a longer sequence."""
        return any(len(one) > len(ids) and one[: len(ids)] == ids for one in self._sequences)
