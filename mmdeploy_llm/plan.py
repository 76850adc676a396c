"""The only language between scheduler, runner and delivery: what a step does, and what came of
it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .outputs import FinishReason, TokenLogprobs
from .params import SamplingParams
from .request import MediaInput, MediaSpan, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """All the runner must know of a request when it starts, or starts again after a preemption.

    token_ids: prompt, and behind `prompt_len` the tokens generated before a preemption.
    reasoning_end_ids: what ends the thinking once it has params.reasoning_max_tokens tokens; ()
    when
    nothing does. bad_words_token_ids: sequences whose last id is banned after the others.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    eos_token_ids: frozenset[int]
    media: tuple[MediaSpan, ...] = ()
    reasoning_end_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """Tokens `start` .. `start + num_tokens` of one request are computed in this step.

    new_block_ids are appended to the request's block table before the step. samples: the last of
    these tokens is the last known one, so that its logits give the next token.
    """

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()
    samples: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step, in the order in which the runner carries it out: drop, forget, new, encode,
    compute.

    drop: request ids whose slots are freed (ended, aborted or preempted since the last plan).
    forget: media keys whose encoder output is no longer needed. encode: media to encode first; each
    key at most once. `scheduled` lists the requests that sample one token (decode) first.
    """

    step_id: int
    drop: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    new: tuple[NewRequest, ...] = ()
    encode: tuple[MediaInput, ...] = ()
    scheduled: tuple[ScheduledTokens, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """Why one request failed: an error code other than 200 and a message for its owner."""

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What the runner computed.

    sampled: request id -> next token id, for every scheduled item with `samples` that did not fail.
    logprobs: request id -> log-probabilities of that token, where asked for.
    prompt_logprobs: request id -> entries for the prompt tokens computed in this step, where
    asked for.
    errors: request id -> why its step failed; such a request has no entry in `sampled`.
    """

    step_id: int
    sampled: Mapping[str, int] = field(default_factory=dict)
    logprobs: Mapping[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    errors: Mapping[str, RequestFailure] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUpdate:
    """What a step changed for one request: the scheduler's word to delivery.

    new_token_ids: tokens appended in this step. finish_reason: set by the scheduler for end of
    sequence and stop ids ("stop"), length, error and abort; None while the request goes on.
    """

    request: Request
    new_token_ids: tuple[int, ...] = ()
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
