"""Speculation: which tokens a decode step tries before they are sampled (drafts).

plan     drafts of the running requests, as many as make the step generate more in its time
commit   the sampled tokens show which guesses were right: a request whose guesses are wrong stops
         drafting, and starts again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mmdeploy_llm.values.plan import StepPlan, StepResult

from .guesses import Guesser, HeadGuesser
from .lifecycle import Lifecycle
from .limits import SchedulerConfig
from .lookup import MAX_DRAFTS
from .pace import Pace
from .state import RequestState
from .trial import Trial

MAX_SEQS = 16  # running requests above which nobody drafts: computing bounds such steps
MIN_RATE = 0.25  # probability of a right guess below which a request does not draft


class Speculation:
    """The drafts of all requests. The scheduler is its only user."""

    def __init__(
        self, requests: Lifecycle, config: SchedulerConfig, clock: Callable[[], float]
    ) -> None:
        """clock: returns seconds from any moment on."""
        self._requests = requests
        self._config = config
        self._clock = clock
        self._pace, self._trial = Pace(), Trial()
        self._new_guesser = HeadGuesser if config.has_draft_head else Guesser
        self._last_commit: float | None = None

    def start(self, state: RequestState) -> None:
        """Decides whether a request that starts, or starts again, has guesses."""
        if state.has_guesses is None:
            state.has_guesses = not self._config.has_draft_head or self._trial.admits()

    def drafts(self, max_tokens: int) -> Mapping[int, tuple[int, ...]]:
        """Returns the drafts of the next step by number of the request, for those that have any.

        max_tokens: that the step may compute. Drafts take no token and no block that the step needs
        to compute the last known token of every request.
        """
        running = self._requests.running
        if len(running) > MAX_SEQS:
            return {}
        found = [
            (state, one.guess, one.rate)
            for state in running
            if (one := state.guesser) is not None
            and one.guess
            and one.rate >= MIN_RATE
            and state.is_decoding
        ]
        if not found:
            return {}
        decoding = [state for state in running if state.is_decoding]
        guesses = [(rate, len(guess)) for _, guess, rate in found]
        length = self._pace.best_length(len(decoding), guesses)
        length = max(0, min(length, (max_tokens - len(running)) // len(found)))
        drafts = {state.number: guess[:length] for state, guess, _ in found}
        needed = [
            self._num_missing(state, 1 + len(drafts.get(state.number, ()))) for state in decoding
        ]
        if not self._requests.pool.can_allocate(sum(needed)):
            free = {state.number: self._num_free(state) for state in decoding}
            drafts = {number: guess[: free[number]] for number, guess in drafts.items()}
        return {number: guess for number, guess in drafts.items() if guess}

    def has_drafts(self, plan: StepPlan) -> bool:
        """Whether a plan has drafts, or the next one is likely to."""
        if any(item.drafts for item in plan.scheduled):
            return True
        return bool(self.drafts(self._config.max_num_batched_tokens))

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from a step that was just committed."""
        now, running = self._clock(), self._requests.running
        seconds = None if self._last_commit is None else now - self._last_commit
        self._last_commit = now
        num_ready = sum(state.has_guesses is True for state in running)
        if seconds is not None and _is_decode(plan):
            num_right = sum(map(len, result.later.values()))
            num_tokens = len(result.sampled) + num_right
            num_requests = len(plan.scheduled)
            if len(running) == num_requests:  # none has ended
                self._trial.observe(
                    seconds, num_requests=num_requests, num_ready=num_ready, num_tokens=num_tokens
                )
            if num_ready:
                self._pace.observe(
                    seconds,
                    num_requests=num_requests,
                    num_rows=plan.num_tokens,
                    num_tokens=num_tokens,
                )
        if num_ready:
            self._learn(plan, result)

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """Compares guesses with what was sampled, and guesses what follows."""
        running = self._requests.running
        num_drafts = {item.request_id: len(item.drafts) for item in plan.scheduled}
        self._requests.num_drafts += sum(num_drafts.values())
        self._requests.num_accepted_drafts += sum(map(len, result.later.values()))
        for state in running:
            name = state.request.request_id
            if len(running) > MAX_SEQS:
                state.guesser = None
            elif name in result.sampled and state.has_guesses:
                num_new = 1 + len(result.later.get(name, ()))
                guesser = state.guesser or self._new_guesser()
                state.guess(guesser, num_new, num_drafts[name])

    def forget_time(self) -> None:
        """Leaves the time of the next step out, because the last one failed."""
        self._last_commit = None

    def _num_missing(self, state: RequestState, num_tokens: int) -> int:
        """Returns how many blocks the next num_tokens tokens of a request need."""
        request = state.request
        num_blocks = self._config.num_blocks_for(request.num_computed_tokens + num_tokens)
        return max(0, num_blocks - len(request.block_ids))

    def _num_free(self, state: RequestState) -> int:
        """Returns how many drafts fit the blocks that a request has."""
        request = state.request
        end = len(request.block_ids) * self._config.block_size
        return max(0, end - request.num_computed_tokens - 1)


def _is_decode(plan: StepPlan) -> bool:
    """Whether all requests of a plan compute a few tokens and sample."""
    short = (item.samples and item.num_tokens <= MAX_DRAFTS + 1 for item in plan.scheduled)
    return bool(plan.scheduled) and not (plan.new or plan.encode) and all(short)
