"""Makes one output of several: of the n completions of a prompt, which the engine computes as n
requests, or of the deltas of one completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from mmdeploy_llm.errors import OK
from mmdeploy_llm.values.outputs.pooled import PooledOutput
from mmdeploy_llm.values.outputs.request_output import Completions, RequestMetrics, RequestOutput

T = TypeVar("T")


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns the output of a prompt from those of its completions, ordered by index."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, PooledOutput):
        return _of_windows([own for own in outputs if isinstance(own, PooledOutput)])
    completions = Completions(completion for output in outputs for completion in output.outputs)
    return replace(
        first,
        outputs=completions,
        metrics=_metrics([output.metrics for output in outputs]),
        error_code=next((each.error_code for each in completions if not each.is_ok), OK),
        error_msg=_message(completions),
    )


def _of_windows(outputs: Sequence[PooledOutput]) -> PooledOutput:
    """Returns the output of a text that was read in windows, the error of one that failed."""
    from mmdeploy_llm.layers.pooling.lengths import of_windows  # imports numpy

    first = next((own for own in outputs if not own.is_ok), outputs[0])
    vectors = [own.vector for own in outputs if own.vector is not None]
    if not first.is_ok or first.wanted is None or len(vectors) < len(outputs):
        return replace(first, vector=None)
    return replace(
        first,
        prompt_token_ids=list(chain.from_iterable(own.prompt_token_ids for own in outputs)),
        num_cached_tokens=sum(own.num_cached_tokens for own in outputs),
        metrics=_metrics([own.metrics for own in outputs]),
        vector=of_windows(vectors, [len(own.prompt_token_ids) for own in outputs], first.wanted),
    )


def joined(deltas: Sequence[RequestOutput]) -> RequestOutput:
    """Returns one delta in place of several of the same completion, in order."""
    if len(deltas) == 1:
        return deltas[0]
    each = [delta.outputs[0] for delta in deltas]
    completion = replace(
        each[-1],
        send_idx=each[0].send_idx,
        token_ids=list(chain.from_iterable(one.token_ids for one in each)),
        text="".join(one.text for one in each),
        reasoning_content=_text([one.reasoning_content for one in each]),
        logprobs=_flat([one.logprobs for one in each]),
        tool_calls=_flat([one.tool_calls for one in each]),
    )
    return replace(deltas[-1], outputs=Completions([completion]))


def _text(each: Sequence[str | None]) -> str | None:
    found = [one for one in each if one is not None]
    return "".join(found) if found else None


def _flat(each: Sequence[tuple[T, ...] | None]) -> tuple[T, ...] | None:
    found = [one for one in each if one is not None]
    return tuple(chain.from_iterable(found)) if found else None


def _message(completions: Completions) -> str | None:
    """Returns why the request failed: the reason that all completions share, or the first one and
    how many failed."""
    failed = [each for each in completions if not each.is_ok]
    if not failed:
        return None
    if len(failed) == len(completions) and len({each.error_msg for each in failed}) == 1:
        return failed[0].error_msg
    return (
        f"{len(failed)} of {len(completions)} completions failed, first completion "
        f"{failed[0].index}: {failed[0].error_msg}"
    )


def _metrics(each: Sequence[RequestMetrics]) -> RequestMetrics:
    """Returns the timings from the start of the first completion to the last token of the
    slowest."""
    starts = [one.inference_start_time for one in each if one.inference_start_time is not None]
    if not starts:
        return each[0]
    start = min(starts)

    def since_start(name: str) -> list[float]:
        durations = [(one.inference_start_time, getattr(one, name)) for one in each]
        return [
            own + seconds - start
            for own, seconds in durations
            if own is not None and seconds is not None
        ]

    totals = [one.model_execute_time for one in each if one.model_execute_time is not None]
    queues = [one.time_in_queue for one in each if one.time_in_queue is not None]
    return replace(
        each[0],
        inference_start_time=start,
        first_token_time=min(since_start("first_token_time"), default=None),
        time_in_queue=min(queues, default=None),
        model_forward_time=max(since_start("model_forward_time"), default=None),
        model_execute_time=max(totals, default=None),
    )
