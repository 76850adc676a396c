"""Makes the record of an item from its output, or from what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ABORTED, InvalidAnswerError
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.values.outputs.pooled import PooledOutput
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
)

from .item import Item, Vector
from .outcome import Verdict, verdict_of
from .record import ItemError, Record, Timings

NUM_DECIMALS = 4  # seconds are rounded to a tenth of a millisecond
LOWEST_LOGPROB = -1e30


def bad_record(item: BadItem) -> Record:
    """Returns the record of a line that cannot be used."""
    return Record(
        id=item.id,
        line=None if item.path is not None else item.line,
        path=item.path,
        finish_reason="error",
        error=ItemError(code=item.code, kind=item.kind, message=item.message),
        item_digest=item.digest,
    )


def record_of(
    item: Item, output: RequestOutput, error: Exception | None = None, config_digest: str = ""
) -> Record:
    """Builds the record of an item from its output. error: the exception, if any. config_digest: of
    the configuration that made the output.

    With several samples, counts are summed, times are those of all samples together, and one failed
    sample makes the item failed.
    """
    samples = output.outputs
    first = samples[0]
    failed = None if output.is_ok else next((own for own in samples if not own.is_ok), first)
    vector = output.vector if isinstance(output, PooledOutput) else None
    verdict = verdict_of(samples, item.params) if vector is None else Verdict(outcome="ok")
    return Record(
        id=item.id,
        line=None if item.path is not None else item.line,
        path=item.path,
        text=first.text.strip(),
        reasoning=_stripped(first.reasoning_content),
        tool_calls=_calls(first),
        finish_reason=(failed or first).finish_reason,
        num_image_tokens=output.num_input_image_tokens,
        num_video_tokens=output.num_input_video_tokens,
        num_tokens_by_kind=_by_kind(output),
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=sum(len(own.token_ids) for own in samples),
        num_cached_tokens=output.num_cached_tokens,
        num_video_frames=output.num_input_video_frames,
        video_seconds=round(output.input_video_seconds, NUM_DECIMALS),
        media_notes=output.media_notes,
        timings=_timings(output.metrics),
        error=None if failed is None else error_of(output, error),
        outcome=verdict.outcome,
        outcome_reason=verdict.reason,
        media=item.media,
        prompt=item.question,
        outputs=_samples(output),
        item_digest=item.digest,
        config_digest=config_digest,
        columns=item.columns,
        endpoint=item.endpoint,
        embedding=None if vector is None else Vector.of(vector),
    )


def _by_kind(output: RequestOutput) -> dict[str, int]:
    """Returns the tokens of media by kind; {} where the fields of images and videos say it all."""
    found = dict(output.num_input_tokens_by_kind)
    return found if set(found) - set(MEDIA_KINDS) else {}


def _samples(output: RequestOutput) -> tuple[dict[str, Any], ...]:
    """Returns the samples where a record's other fields do not say everything about them; the first
    one with the log-probabilities of the prompt."""
    own = output.outputs
    if len(own) == 1 and own.logprobs is None and not output.prompt_logprobs:
        return ()
    samples = tuple(map(_sample, own))
    if output.prompt_logprobs is not None:
        samples[0]["prompt_logprobs"] = [_candidates(found) for found in output.prompt_logprobs]
    return samples


def error_of(failed: RequestOutput | CompletionOutput, error: Exception | None = None) -> ItemError:
    """Returns the error of an output or sample that failed. error: the exception, if any."""
    message = failed.error_msg or "no message was given"
    return ItemError(
        code=failed.error_code, kind=_class_of(failed.error_code, error), message=message
    )


def _class_of(code: int, error: Exception | None) -> str:
    if error is not None:
        return type(error).__name__
    if code == InvalidAnswerError.code:
        return InvalidAnswerError.__name__
    return "Aborted" if code == ABORTED else "EngineError" if code >= 500 else "RequestError"


def _sample(own: CompletionOutput) -> dict[str, Any]:
    """Returns one of n samples with its token ids, and log-probabilities if requested."""
    sample: dict[str, Any] = {
        "index": own.index,
        "text": own.text.strip(),
        "reasoning": _stripped(own.reasoning_content),
        "finish_reason": own.finish_reason,
        "error": None if own.is_ok else error_of(own).to_json(),
        "token_ids": list(own.token_ids),
    }
    if own.tool_calls:
        sample["tool_calls"] = _calls(own)
    if own.logprobs is not None:
        sample["logprobs"] = _logprobs(own)
    return sample


def _calls(own: CompletionOutput) -> tuple[Mapping[str, Any], ...]:
    return tuple(call.to_dict() for call in own.tool_calls or ())


def _logprobs(own: CompletionOutput) -> list[Any]:
    return [_candidates(found) for found in own.logprobs or ()]


def _candidates(found: Mapping[int, Any] | None) -> list[dict[str, Any]] | None:
    if found is None:
        return None
    # A candidate of probability 0 has log-probability -inf, which JSON cannot represent.
    return [
        {**asdict(own), "token_id": token, "logprob": max(own.logprob, LOWEST_LOGPROB)}
        for token, own in found.items()
    ]


def _stripped(text: str | None) -> str | None:
    return None if text is None else text.strip()


def _timings(metrics: RequestMetrics) -> Timings:
    return Timings(
        preprocess=_rounded(metrics.preprocess_time),
        queue=_rounded(metrics.time_in_queue),
        first_token=_rounded(metrics.first_token_time),
        generate=_rounded(metrics.model_forward_time),
        total=_rounded(metrics.model_execute_time),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, NUM_DECIMALS)
