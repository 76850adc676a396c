"""Speculation: which tokens a decode step tries before they are sampled (drafts).

plan     drafts of the running requests, as many as make the step generate more in its time
commit   the sampled tokens show which guesses were right, also of those that were not drafted: so a
         request whose guesses are wrong stops drafting, and starts again, at no cost
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmdeploy_llm.plan import StepPlan, StepResult

from .lookup import MAX_DRAFTS, Lookup
from .pace import Pace

if TYPE_CHECKING:
    from .state import RequestState

MAX_SEQS = 16  # running requests above which nobody drafts: computing bounds such steps
MIN_RATE = 0.25  # probability of a right guess below which a request does not draft
MEMORY = 0.9  # weight of earlier guesses relative to those of the last step


class Guesser:
    """The guesses of one request, and how many of the last ones were right. Writer:
    Speculation."""

    def __init__(self) -> None:
        self.guess: tuple[int, ...] = ()
        self._lookup = Lookup()
        self._num_right, self._num_tried = 1.0, 2.0  # one of two, before any is known

    @property
    def rate(self) -> float:
        """The probability that the next token of a guess is right."""
        return self._num_right / self._num_tried

    def follow(self, state: RequestState, num_new: int) -> None:
        """Compares the guess with the last num_new tokens of a request, and guesses what
        follows."""
        prompt, output = state.request.prompt_token_ids, state.request.output_token_ids
        tried = list(zip(self.guess, output[-num_new:], strict=False))
        wrong = (at for at, (guessed, token_id) in enumerate(tried) if guessed != token_id)
        num_right = next(wrong, len(tried))
        if tried:
            self._num_right = MEMORY * self._num_right + num_right
            self._num_tried = MEMORY * self._num_tried + min(len(tried), num_right + 1)
        if not len(self._lookup):
            self._lookup.extend(prompt)
        self._lookup.extend(output[len(self._lookup) - len(prompt) :])
        self.guess = _before_end(state, self._lookup.proposal())


class Speculation:
    """The drafts of all requests. The scheduler is its only user.

    num_drafts, num_accepted: tokens that were tried, and those of them that were right.
    """

    def __init__(self, *, is_on: bool) -> None:
        """is_on: False never drafts anything."""
        self._is_on = is_on
        self.num_drafts = self.num_accepted = 0
        self._pace = Pace()
        self._last_commit: float | None = None

    def drafts(self, running: Sequence[RequestState]) -> Mapping[int, tuple[int, ...]]:
        """Returns the drafts of the next step by number of the request, for those that have any."""
        if not self._is_on or len(running) > MAX_SEQS:
            return {}
        decoding = [state for state in running if state.is_decoding]
        guessers = [(state.number, state.guesser) for state in decoding]
        found = {
            number: one
            for number, one in guessers
            if one is not None and one.guess and one.rate >= MIN_RATE
        }
        if not found:
            return {}
        guesses = [(one.rate, len(one.guess)) for one in found.values()]
        length = self._pace.best_length(len(decoding), guesses)
        return {number: one.guess[:length] for number, one in found.items()} if length else {}

    def has_drafts(self, plan: StepPlan, running: Sequence[RequestState]) -> bool:
        """Whether a plan has drafts, or the next one is likely to."""
        return any(item.drafts for item in plan.scheduled) or bool(self.drafts(running))

    def is_decode(self, plan: StepPlan, states: Mapping[str, RequestState]) -> bool:
        """Whether all requests of a plan that is about to be committed compute a few tokens after
        their prompts."""
        known = [(item, states.get(item.request_id)) for item in plan.scheduled]
        return not (plan.new or plan.encode) and all(
            state is not None
            and item.num_tokens <= MAX_DRAFTS + 1
            and item.start >= len(state.request.prompt_token_ids)
            for item, state in known
        )

    def commit(
        self,
        plan: StepPlan,
        result: StepResult,
        running: Sequence[RequestState],
        now: float,
        *,
        is_decode: bool,
    ) -> None:
        """Learns from a step that was committed at `now`, in epoch seconds. running: the requests
        that go on."""
        if not self._is_on:
            return
        num_accepted = sum(len(tokens) for tokens in result.accepted.values())
        self.num_drafts += sum(len(item.drafts) for item in plan.scheduled)
        self.num_accepted += num_accepted
        if is_decode and self._last_commit is not None and plan.scheduled:
            self._pace.observe(
                now - self._last_commit,
                num_requests=len(plan.scheduled),
                num_rows=plan.num_tokens,
                num_tokens=len(result.sampled) + num_accepted,
            )
        self._last_commit = now
        for state in running:
            if len(running) > MAX_SEQS:
                state.guesser = None
            elif state.request.request_id in result.sampled:
                num_new = 1 + len(result.accepted.get(state.request.request_id, ()))
                state.guesser = state.guesser or Guesser()
                state.guesser.follow(state, num_new)

    def forget_time(self) -> None:
        """Leaves the time of the next step out, because the last one failed."""
        self._last_commit = None


def _before_end(state: RequestState, guess: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the guess up to where the request would end: no token is sampled after that."""
    num_left = state.max_num_tokens - state.request.num_tokens - 1
    ends = (at for at, token_id in enumerate(guess) if token_id in state.stop_ids)
    return guess[: max(0, min(num_left, next(ends, len(guess))))]
