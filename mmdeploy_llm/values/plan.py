"""The values that scheduler, runner and delivery exchange: what a step does, and its results."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmdeploy_llm.request import MediaInput, MediaSpan, Request

from .adapter_ref import AdapterRef
from .outputs.request_output import FinishReason, TokenLogprobs
from .params import SamplingParams
from .pooling_request import PoolingRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Rows of the states of a model, see ScheduledTokens.state_rows.
ZERO_ROW = 0  # always zero: the state before a sequence's first token
PADDING_ROW = 1  # written by padding of recorded steps, never read
NUM_FIXED = 2
UNKNOWN = -1  # a draft that the runner guesses itself; one that it did not guess equals no token


def stop_ids_of(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that end a request."""
    eos_ids = frozenset() if params.ignore_eos else eos_token_ids
    return eos_ids.union(params.stop_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request as the runner gets it when it starts, or starts again after a preemption.

    token_ids: the prompt, followed by tokens generated before a preemption.
    prompt_len: tokens in the prompt.
    media: in prompt order.
    reasoning_end_ids: forced once the thinking has params.reasoning_max_tokens tokens; () forces
        nothing.
    prompt_text: of a request with a constraint, for its reasoning parser.
    bad_words_token_ids: sequences that are never generated: after all ids but the last, the last
        one is banned.
    wanted, token_types, heads: see Request.
    adapter: key of its adapter; "": none.
    has_guesses: whether a draft head, if the model has one, gets ready to guess its tokens.
    """

    request_id: str
    token_ids: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    eos_token_ids: frozenset[int]
    media: tuple[MediaSpan, ...] = ()
    reasoning_end_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_text: str = ""
    wanted: PoolingRequest | None = None
    token_types: tuple[int, ...] | None = None
    heads: tuple[tuple[int, int], ...] = ()
    adapter: str = ""
    has_guesses: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """The tokens of one request that a step computes: `start` .. `start + num_tokens`.

    new_block_ids: appended to the request's block table before the step. new_window_ids: to its
        block table of the layers with a window, if the model has such layers.
    samples: whether the next token is sampled from the logits of the last one, because it is the
        last token known so far.
    state_rows: the rows that hold the request's states before and after the step, see
        forward.StateContext; None for a model without states.
    drafts: the last of the tokens, which are guesses, UNKNOWN each where the runner makes them.
        After each that is right another token is sampled.
    """

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: tuple[int, ...] = ()
    samples: bool = True
    state_rows: tuple[int, int] | None = None
    drafts: tuple[int, ...] = ()
    new_window_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The work of one step. The fields are in the order in which the runner carries them out.

    drop: request ids whose slots are freed (ended, aborted or preempted since the last plan).
    forget: media keys whose encoder output is no longer needed.
    unload: keys of adapters whose memory is freed. load: adapters to read.
    new: requests that get a slot.
    encode: media to encode; each key at most once.
    scheduled: the tokens to compute; requests that compute one token (decode) come first.
    """

    step_id: int
    drop: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    load: tuple[AdapterRef, ...] = ()
    new: tuple[NewRequest, ...] = ()
    encode: tuple[MediaInput, ...] = ()
    scheduled: tuple[ScheduledTokens, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """Why one request failed: an error code other than 200 and a message for the caller."""

    code: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The results of a step, by request id.

    sampled: the next token id, for every scheduled item with `samples` that did not fail.
    later: the tokens after that one, of requests whose first drafts were right.
    logprobs: log-probabilities of each of these tokens, where requested.
    prompt_logprobs: entries for the prompt tokens computed in this step, where requested.
    errors: why the request failed in this step; it has no entry in `sampled` then.
    certain: of requests with an early stop, the id and the place in this step of each token that
        was more probable than its threshold.
    vectors: of the requests that want no text and whose prompt ends with this step.
    attention: of the requests with heads whose answer ends with this step, see CompletionOutput.
    """

    step_id: int
    sampled: Mapping[str, int] = field(default_factory=dict)
    later: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    errors: Mapping[str, RequestFailure] = field(default_factory=dict)
    certain: Collection[tuple[str, int]] = ()
    vectors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    attention: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUpdate:
    """The changes of one step to one request; passed from the scheduler to delivery.

    new_token_ids: tokens appended in this step. logprobs: of each of them, where requested.
    finish_reason: set by the scheduler: "stop" for end-of-sequence and stop ids, "length",
        "repetition" for an early stop, "error" or "abort"; None while the request continues.
    failure: why it ended with "error" or "abort". vector, attention: see StepResult.
    """

    request: Request
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    vector: NDArray[np.float32] | None = None
    attention: NDArray[np.float32] | None = None
