"""Guesses the next tokens of a request, and how probable it is that a guess is right."""

from __future__ import annotations

from collections.abc import Collection

from mmdeploy_llm.request import Request
from mmdeploy_llm.values.plan import UNKNOWN

from .lookup import MAX_DRAFTS, Lookup

MEMORY = 0.9  # weight of earlier guesses relative to those of the last step
RETRY_AFTER = 64  # steps without drafts, after which a draft head is trusted as at the beginning


class Rate:
    """How many of the last guesses were right. Writer: the guesser that has it."""

    def __init__(self) -> None:
        self._num_right, self._num_tried = 1.0, 2.0  # one of two, before any is known

    @property
    def value(self) -> float:
        """The probability that the next token of a guess is right."""
        return self._num_right / self._num_tried

    def observe(self, num_right: int, num_tried: int) -> None:
        """Adds a guess: none of its tokens counts after the first that was wrong."""
        self._num_right = MEMORY * self._num_right + num_right
        self._num_tried = MEMORY * self._num_tried + min(num_tried, num_right + 1)


class Guesser:
    """Looks the next tokens of one request up in its text. Guesses are compared with what is
    sampled also where they were not drafted. Writer: Speculation."""

    def __init__(self) -> None:
        self.guess: tuple[int, ...] = ()
        self._lookup = Lookup()
        self._rate = Rate()

    @property
    def rate(self) -> float:
        """The probability that the next token of a guess is right."""
        return self._rate.value

    def follow(
        self,
        request: Request,
        *,
        num_new: int,
        num_drafts: int,
        num_left: int,
        stop_ids: Collection[int],
    ) -> None:
        """Compares the guess with the last num_new tokens of a request, and guesses what follows.
        num_drafts: how many of the guess were drafted. num_left: how many may be, the next time.
        stop_ids: those that end the request."""
        prompt, output = request.prompt_token_ids, request.output_token_ids
        tried = list(zip(self.guess, output[-num_new:], strict=False))
        wrong = (at for at, (guessed, token_id) in enumerate(tried) if guessed != token_id)
        if tried:
            self._rate.observe(next(wrong, len(tried)), len(tried))
        if not len(self._lookup):
            self._lookup.extend(prompt)
        self._lookup.extend(output[len(self._lookup) - len(prompt) :])
        guess = self._lookup.proposal()[:num_left]
        ends = (at for at, token_id in enumerate(guess) if token_id in stop_ids)
        self.guess = guess[: next(ends, len(guess))]


class HeadGuesser:
    """Leaves the guesses of one request to the draft head of the model, which costs time: only
    drafts tell whether they are right, and where they are not, they are tried again later. Writer:
    Speculation."""

    def __init__(self) -> None:
        self.guess: tuple[int, ...] = ()
        self._rate = Rate()
        self._num_idle = 0

    @property
    def rate(self) -> float:
        """See Guesser."""
        return self._rate.value

    def follow(
        self,
        request: Request,
        *,
        num_new: int,
        num_drafts: int,
        num_left: int,
        stop_ids: Collection[int],
    ) -> None:
        """See Guesser."""
        self._num_idle = 0 if num_drafts else self._num_idle + 1
        if num_drafts:
            self._rate.observe(num_new - 1, num_drafts)
        elif self._num_idle == RETRY_AFTER:
            self._rate, self._num_idle = Rate(), 0
        self.guess = (UNKNOWN,) * min(num_left, MAX_DRAFTS)
