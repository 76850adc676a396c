"""Trial: which requests the draft head gets ready for. That costs time with each token, also with
those that it never guesses, so that small models are faster without it where it guesses little."""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS = 64  # before which a time is not known
MEMORY = 1024  # tokens, after which what is known counts half
TRIED_EVERY = 32  # requests, of which one is tried the other way


@dataclass(slots=True)
class Spent:
    """The time of decode steps and their tokens. Writer: Trial."""

    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there are enough of them."""
        return self.tokens >= MIN_TOKENS

    def add(self, seconds: float, tokens: int) -> None:
        """Adds a step."""
        self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
        if self.tokens > MEMORY:
            self.seconds, self.tokens = self.seconds / 2, self.tokens / 2


class Trial:
    """Compares the time of a token with the draft head and without. Writer: Speculation."""

    def __init__(self) -> None:
        self._spent: dict[int, tuple[Spent, Spent]] = {}  # by number of requests: without, with
        self._num_starts = 0

    def admits(self) -> bool:
        """Whether the draft head gets ready for the request that starts now."""
        pays = self._pays()
        if pays is None:  # first with it, then without
            return not any(own.is_known for _, own in self._spent.values())
        self._num_starts += 1
        return pays != (self._num_starts % TRIED_EVERY == 0)

    def observe(
        self, seconds: float, *, num_requests: int, num_ready: int, num_tokens: int
    ) -> None:
        """Adds a decode step: for `num_ready` of its requests the head is ready. Steps of both
        kinds of requests tell nothing."""
        if num_ready in (0, num_requests):
            spent = self._spent.setdefault(num_requests, (Spent(), Spent()))
            spent[num_ready > 0].add(seconds, num_tokens)

    def _pays(self) -> bool | None:
        """Whether tokens take less time with it; None while that is not known."""
        both = [own for own in self._spent.values() if all(one.is_known for one in own)]
        if not both:
            return None
        without = sum(bare.seconds / bare.tokens * own.tokens for bare, own in both)
        return sum(own.seconds for _, own in both) < without
