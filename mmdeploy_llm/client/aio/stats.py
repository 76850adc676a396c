"""RequestStats: the statistics of one request."""

from __future__ import annotations

from dataclasses import dataclass

from mmdeploy_llm.values.outputs.request_output import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Timings and counts of one request, by the names of DashInfer's RequestStatInfo. Times of day
    are epoch times and durations are in seconds; None until it is known.

    first_token_time, last_token_time, finished_time: times of day; the last token finishes the
        request.
    time_to_first_token: from arrival.
    time_in_queue: from the end of the preprocessing to the start of the computation.
    context_token_length: tokens of the prompt, media included.
    context_cached_length: those of them that the prefix cache had.
    context_tps: tokens of the prompt per second, from the start to the first token.
    generate_tps: tokens per second after the first one.
    """

    arrival_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_to_first_token: float | None = None
    time_in_queue: float | None = None
    context_token_length: int = 0
    generated_token_length: int = 0
    context_cached_length: int = 0
    context_tps: float | None = None
    generate_tps: float | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> RequestStats:
        """Returns the statistics of a request, from all of its output so far."""
        metrics, num_prompt = output.metrics, len(output.prompt_token_ids)
        num_generated = sum(len(completion.token_ids) for completion in output.outputs)
        start, first, last = (
            metrics.inference_start_time,
            metrics.first_token_time,
            metrics.model_forward_time,
        )
        first_at = None if start is None or first is None else start + first
        last_at = None if start is None or last is None else start + last
        decode = None if first is None or last is None else last - first
        return cls(
            arrival_time=metrics.arrival_time,
            first_token_time=first_at,
            last_token_time=last_at,
            finished_time=last_at if output.finished else None,
            time_to_first_token=None if first_at is None else first_at - metrics.arrival_time,
            time_in_queue=metrics.time_in_queue,
            context_token_length=num_prompt,
            generated_token_length=num_generated,
            context_cached_length=output.num_cached_tokens,
            context_tps=num_prompt / first if first else None,
            generate_tps=(num_generated - len(output.outputs)) / decode if decode else None,
        )
