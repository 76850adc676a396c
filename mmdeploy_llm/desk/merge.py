"""Makes one output of the n completions of a prompt, which the engine computes as n requests."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from mmdeploy_llm.errors import OK
from mmdeploy_llm.outputs import Completions, RequestMetrics, RequestOutput

from .arguments import Pairs
from .outcome import JobOutput


class Merger:
    """Collects finished completions until those of a prompt are complete. Holds the outputs of
    unfinished prompts only."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, JobOutput]] = {}  # by job and index of the completion

    def add(self, item: JobOutput) -> JobOutput | None:
        """Returns the prompt's output when `item` holds its last missing completion, else None. A
        completion that is known already keeps its first output."""
        job = item.job
        parts = self._parts.setdefault(job.index, {})
        parts.setdefault(item.output.outputs.index, item)
        if len(parts) < job.num_outputs:
            return None
        del self._parts[job.index]
        return _merged([parts[index] for index in sorted(parts)])


def whole_outputs(items: Generator[JobOutput, None, None]) -> Generator[JobOutput, None, None]:
    """Yields one output for each prompt, when its last completion has finished. Closing it closes
    `items`."""
    merger = Merger()
    with closing(items):
        for item in items:
            whole = merger.add(item)
            if whole is not None:
                yield whole


def outputs_of(items: Generator[JobOutput, None, None], pairs: Pairs) -> Iterator[RequestOutput]:
    """Yields the outputs alone. Raises the error of the pairs after the last one."""
    with closing(items):
        for item in items:
            yield item.output
    if pairs.error is not None:
        raise pairs.error


def deltas(items: Generator[JobOutput, None, None]) -> Iterator[RequestOutput]:
    """Yields the deltas of a stream, with one request_id for all completions of a prompt."""
    names: dict[int, str] = {}
    num_left: dict[int, int] = {}
    with closing(items):
        for item in items:
            job, output = item.job, item.output
            name = names.setdefault(job.index, output.request_id)
            if output.finished:
                num_left[job.index] = num_left.get(job.index, job.num_outputs) - 1
                if not num_left[job.index]:
                    del names[job.index], num_left[job.index]
            yield output if name == output.request_id else replace(output, request_id=name)


def _merged(items: Sequence[JobOutput]) -> JobOutput:
    """Returns the output of a prompt from those of its completions, ordered by index."""
    first = items[0]
    if len(items) == 1:
        return first
    outputs = [item.output for item in items]
    completions = Completions(completion for output in outputs for completion in output.outputs)
    output = replace(
        first.output,
        outputs=completions,
        metrics=_metrics([output.metrics for output in outputs]),
        error_code=next((each.error_code for each in completions if not each.is_ok), OK),
        error_msg=_message(completions),
    )
    error = next((item.error for item in items if item.error is not None), None)
    return JobOutput(job=first.job, output=output, error=error)


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
