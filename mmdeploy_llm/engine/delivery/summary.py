"""Sums up a request for outputs and observers: timings, counts and ids."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import ABORTED, OK, EngineError
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.metrics import RequestRecord
from mmdeploy_llm.values.outputs.pooled import PooledOutput
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    RequestMetrics,
    RequestOutput,
    StopReason,
    ToolCall,
)
from mmdeploy_llm.values.plan import RequestFailure, TokenUpdate

# Fields of an output, and of its media, that are summed.
VIDEOS = (("num_input_video_frames", "num_frames"), ("input_video_seconds", "seconds"))
STOPS = ("stop", "tool_calls")  # reasons of a request that the model or a stop has ended
FAILURES = {  # of requests that ended for a reason that nobody gave
    "abort": RequestFailure(
        code=ABORTED,
        message="the request was aborted; the output holds what was generated before",
    ),
    "error": RequestFailure(
        code=EngineError.code, message="the request failed for a reason that was not given"
    ),
}


def record_of(request: Request, output: RequestOutput) -> RequestRecord:
    """Builds the record of a request for observers; `output` is its last one."""
    reason, last = output.outputs.finish_reason, output.outputs.token_ids
    assert reason is not None, f"request {request.request_id} has not ended"
    return RequestRecord(
        request_id=request.request_id,
        finish_reason=reason,
        error_code=output.error_code,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(request.output_token_ids if request.stream else last),  # up to a stop
        num_cached_tokens=request.num_cached_tokens,
        num_media_tokens=num_media_tokens(request),
        metrics=output.metrics,
    )


def stop_of(request: Request, found: StopReason) -> StopReason:
    """Returns the stop that ended a request: `found` in its text or ids, else its last id if that
    is one of its stop ids."""
    last = request.output_token_ids[-1] if found is None else None
    is_stop = last in request.params.stop_token_ids and last not in request.eos_token_ids
    return last if is_stop else found


def metrics_of(request: Request) -> RequestMetrics:
    """Returns the timings of a request that has ended or runs."""
    started, ended = request.inference_start_time, request.last_token_time
    return RequestMetrics(
        arrival_time=request.arrival_time,
        inference_start_time=started,
        first_token_time=_between(started, request.first_token_time),
        time_in_queue=_between(request.preprocess_end_time, started),
        model_forward_time=_between(started, ended),
        model_execute_time=_between(request.arrival_time, ended),
        preprocess_time=request.preprocess_end_time - request.arrival_time,
    )


def _between(start: float | None, end: float | None) -> float | None:
    """Returns the seconds from `start` to `end`, None when one of them is missing."""
    return None if start is None or end is None else end - start


def num_media_tokens(request: Request) -> dict[str, int]:
    """Returns the media tokens of each kind, for MEDIA_KINDS and the request's other kinds."""
    kinds = dict.fromkeys(kind for span in request.media for kind in span.item.counts)
    return {kind: request.num_media_tokens(kind) for kind in (*MEDIA_KINDS, *kinds)}


def media_fields(request: Request) -> dict[str, Any]:
    """Returns what an output says about the media of its request."""
    counts = num_media_tokens(request)
    tokens: dict[str, Any] = {f"num_input_{kind}_tokens": counts[kind] for kind in MEDIA_KINDS}
    found = {kind for span in request.media for kind in span.item.counts}
    tokens["num_input_tokens_by_kind"] = {k: num for k, num in counts.items() if k in found}
    notes = tuple(dict.fromkeys(note for span in request.media for note in span.item.notes))
    sums = {n: sum(getattr(s.item, f) for s in request.media) for n, f in VIDEOS}
    return {**tokens, **sums, "media_notes": notes}


def with_id(call: ToolCall, request_id: str) -> ToolCall:
    """Gives the call an id in FastDeploy's format, unless it has one."""
    digest = hashlib.blake2b(f"{request_id} {call.index}".encode(), digest_size=16).hexdigest()
    return call if call.id else replace(call, id=f"chatcmpl-tool-{digest}")


def can_end_here(request: Request) -> bool:
    """Whether delivery may end the request: at a stop text, or in a stream when a parser fails."""
    params = request.params
    return request.stream or bool(params.stop or params.stop_token_sequences)


def is_stale(update: TokenUpdate) -> bool:
    """Whether delivery has ended this request before: it has tokens that are not new, but no state.

    Only what ends a request here can leave the scheduler with an update of an ended request.
    """
    request = update.request
    return can_end_here(request) and len(request.output_token_ids) > len(update.new_token_ids)


def pooled_output(update: TokenUpdate) -> PooledOutput | None:
    """Returns the output of a request that has ended; None for one that goes on."""
    request, reason = update.request, update.finish_reason
    if reason is None:
        return None
    failure = update.failure or FAILURES.get(reason)
    code = OK if failure is None else failure.code
    message = None if failure is None else failure.message
    completion = CompletionOutput(
        index=request.index, finish_reason=reason, error_code=code, error_msg=message
    )
    own, of_media = request.wanted, media_fields(request)
    notes = (*(() if own is None else own.notes), *of_media["media_notes"])
    return PooledOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        item=request.item,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=Completions([completion]),
        finished=True,
        metrics=metrics_of(request),
        num_cached_tokens=request.num_cached_tokens,
        **{**of_media, "media_notes": notes},
        error_code=code,
        error_msg=message,
        vector=update.vector,
        wanted=own,
    )
