"""Step and request statistics that observers receive through hooks; nothing here exports them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .request_output import FinishReason, RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Description of an engine, passed to observers when it starts and stops."""

    model: str
    architecture: str
    device: str
    dtype: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Statistics of one engine step. Times in seconds."""

    step_id: int
    num_scheduled_tokens: int
    num_scheduled_requests: int
    num_sampled_tokens: int
    num_encoded_media: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int  # since the engine started
    plan_time: float
    run_time: float
    deliver_time: float  # commit, deliver and release


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of an engine at one moment. Tokens and preemptions count from its start.

    num_running: requests that hold blocks of the KV cache.
    num_waiting: requests that wait for admission, preempted ones included.
    num_free_blocks: blocks that can be allocated, those with cached content included.
    num_blocks: all blocks.
    num_queried_tokens: tokens of the prompts that were admitted.
    num_cached_tokens: those of them that were found in the prefix cache.
    num_generated_tokens: tokens sampled for all requests.
    num_drafts: tokens that were tried before they were sampled (speculative).
    num_accepted_drafts: those of them that were sampled: each saved its request a step.
    """

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_queried_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_drafts: int = 0
    num_accepted_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """Statistics of a finished request, without its text.

    num_output_tokens: of a stream with speculation also those that were sampled in one step with a
        stop string, after it.
    """

    request_id: str
    finish_reason: FinishReason
    error_code: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_media_tokens: Mapping[str, int]
    metrics: RequestMetrics
