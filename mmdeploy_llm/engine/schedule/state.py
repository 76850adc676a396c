"""RequestState: a request with the state that only the scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from mmdeploy_llm.request import Request, RequestStatus
from mmdeploy_llm.values.outputs.request_output import FinishReason, TokenLogprobs
from mmdeploy_llm.values.params import EarlyStopParams
from mmdeploy_llm.values.plan import ZERO_ROW, NewRequest, StepResult, stop_ids_of

from .guesses import Guesser, HeadGuesser
from .limits import SchedulerConfig
from .prefix import PrefixKeys


@dataclass(slots=True)
class WindowTable:
    """The block table of one request in the layers with a window.

    ids: a block for each place of the table. The first `num_returned` were given back, or never
        taken, because no token attends to them any more.
    num_known: the first of `ids`, which the runner knows already.
    """

    ids: list[int] = field(default_factory=list)
    num_returned: int = 0
    num_known: int = 0

    @property
    def held(self) -> list[int]:
        """The blocks that the request uses."""
        return self.ids[self.num_returned :]


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One unfinished request. The scheduler is the only writer.

    number: index of the request in the order of `add`.
    order: key by which requests are served, smallest first: priority, arrival, number.
    stop_ids: token ids that end the request.
    max_num_tokens: number of prompt and output tokens at which it ends. next_end: at which it ends
        or is computed again, see SchedulerConfig.long_after.
    num_registered_blocks: leading blocks of its table that were offered to the prefix cache.
    num_prompt_logprobs: entries delivered so far.
    num_computed_logprobs: entries computed since admission.
    num_certain: last tokens in a row that were nearly certain, see EarlyStopParams.
    state_row: of the model's states after the computed tokens. planned_rows: those that planned
        steps will write, in order.
    shared_end: where the tokens end that others have too, as far as is known: the media of a
        request that is shared, or what another one has computed without a state that was kept; a
        state is kept there.
    guesser: guesses its next tokens; None without speculation, and before the first token.
    has_guesses: whether it may have one; None before it starts, see Trial.
    window: its blocks in the layers with a window; empty in a model without.
    """

    request: Request
    number: int
    order: tuple[int, float, int]
    stop_ids: frozenset[int]
    max_num_tokens: int
    next_end: int
    keys: PrefixKeys
    num_registered_blocks: int = 0
    num_prompt_logprobs: int = 0
    num_computed_logprobs: int = 0
    num_certain: int = 0
    state_row: int = ZERO_ROW
    planned_rows: list[int] = field(default_factory=list)
    shared_end: int = 0
    guesser: Guesser | HeadGuesser | None = None
    has_guesses: bool | None = None
    window: WindowTable = field(default_factory=WindowTable)

    @classmethod
    def of(cls, request: Request, number: int, config: SchedulerConfig) -> Self:
        """Builds the state of a request that was just added."""
        params, max_model_len, long_after = request.params, config.max_model_len, config.long_after
        max_output = max_model_len if params.max_tokens is None else params.max_tokens
        if request.wanted is not None:
            max_output = 0
        max_num_tokens = min(len(request.prompt_token_ids) + max_output, max_model_len)
        is_long = long_after is not None and request.num_tokens > long_after
        limit = max_model_len if long_after is None or is_long else long_after + 1
        return cls(
            request=request,
            number=number,
            order=(request.priority, request.arrival_time, number),
            stop_ids=stop_ids_of(params, request.eos_token_ids),
            max_num_tokens=max_num_tokens,
            next_end=min(max_num_tokens, limit),
            keys=PrefixKeys(request, config.block_size, is_long=is_long),
            shared_end=_media_end(request, config.block_size) if request.is_shared else 0,
        )

    @property
    def is_decoding(self) -> bool:
        """Whether the last generated token is the only one left to compute."""
        request = self.request
        num_prompt, num_computed = len(request.prompt_token_ids), request.num_computed_tokens
        return num_computed >= num_prompt and (
            num_computed == num_prompt + len(request.output_token_ids) - 1
        )

    def is_before(self, other: RequestState) -> bool:
        """Whether it has a smaller priority, not only an earlier place among equals."""
        return self.request.priority < other.request.priority

    def can_go_on(self, num_unknown: int) -> bool:
        """Whether it is running and its length allows a token after `num_unknown` sampled tokens
        that the host does not have yet."""
        request = self.request
        is_running = request.status is RequestStatus.RUNNING
        return is_running and request.num_tokens + num_unknown < self.next_end

    def append_all(self, result: StepResult, now: float) -> FinishReason | None:
        """Appends a step's tokens up to one that ends the request; returns the finish reason."""
        name, reason = self.request.request_id, None
        for at, token_id in enumerate((result.sampled[name], *result.later.get(name, ()))):
            reason = reason or self.append(token_id, now, is_certain=(name, at) in result.certain)
        return reason

    def guess(self, guesser: Guesser | HeadGuesser, num_new: int, num_drafts: int) -> None:
        """Lets a guesser guess what follows the last num_new tokens, before which num_drafts were
        drafted: no token is sampled after the request ends, or is computed again."""
        self.guesser = guesser
        guesser.follow(
            self.request,
            num_new=num_new,
            num_drafts=num_drafts,
            num_left=max(0, self.next_end - self.request.num_tokens - 1),
            stop_ids=self.stop_ids,
        )

    def end_prompt(self, now: float) -> bool:
        """Marks the end of a request that wants no text, and returns whether it has come."""
        request = self.request
        if request.num_computed_tokens < request.num_tokens:
            return False
        request.first_token_time = request.last_token_time = now
        return True

    def append(self, token_id: int, now: float, *, is_certain: bool = False) -> FinishReason | None:
        """Appends a token generated at `now` (epoch seconds); returns the finish reason, if any."""
        request = self.request
        request.output_token_ids.append(token_id)
        if request.first_token_time is None:
            request.first_token_time = now
        request.last_token_time = now
        num_output = len(request.output_token_ids)
        self.num_certain = self.num_certain + 1 if is_certain else 0
        is_guided = request.params.guided_decoding is not None  # then no answer ends incomplete
        if token_id in self.stop_ids and (is_guided or num_output >= request.params.min_tokens):
            return "stop"
        if num_output >= request.params.min_tokens:
            early_stop = request.params.early_stop
            if isinstance(early_stop, EarlyStopParams) and (
                self.num_certain >= early_stop.window_size
            ):
                return "repetition"
        is_full = len(request.prompt_token_ids) + num_output >= self.max_num_tokens
        return "length" if is_full else None

    def fresh_logprobs(
        self, entries: tuple[TokenLogprobs | None, ...]
    ) -> tuple[TokenLogprobs | None, ...]:
        """Returns `entries` without those that were delivered before a preemption."""
        skipped = max(0, self.num_prompt_logprobs - self.num_computed_logprobs)
        self.num_computed_logprobs += len(entries)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, self.num_computed_logprobs)
        return entries[skipped:]

    def start_over(self) -> None:
        """Resets all computed state but keeps the tokens. The blocks must be free already."""
        self.request.num_computed_tokens = 0
        self.request.block_ids = []
        self.num_computed_logprobs = 0
        self.guesser = None

    def to_new_request(self) -> NewRequest:
        """Returns what the runner must know when the request starts, or starts again."""
        request = self.request
        return NewRequest(
            request_id=request.request_id,
            token_ids=(*request.prompt_token_ids, *request.output_token_ids),
            prompt_len=len(request.prompt_token_ids),
            params=request.params,
            eos_token_ids=request.eos_token_ids,
            media=request.media,
            reasoning_end_ids=request.reasoning_end_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            wanted=request.wanted,
            token_types=request.token_types,
            heads=request.heads,
            prompt_text="" if request.params.guided_decoding is None else request.prompt_text,
            adapter="" if request.adapter is None else request.adapter.key,
            has_guesses=self.has_guesses is not False,
        )


def _media_end(request: Request, block_size: int) -> int:
    """Returns where the last full block of the prompt's media ends; 0 without media."""
    return request.media[-1].end // block_size * block_size if request.media else 0
