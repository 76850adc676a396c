"""Delivery: turns the changes of a step into RequestOutputs, deltas or complete ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import OK
from mmdeploy_llm.hooks.objects.parsing import ReasoningParser, ToolParser
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.request_output import (
    CompletionOutput,
    Completions,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenLogprobs,
)
from mmdeploy_llm.values.plan import RequestFailure, TokenUpdate

from .constraint import Matches, breach, tags_in
from .detokenizer import Vocabulary
from .pipeline import ParserSource, ParserSources, TextPipeline
from .summary import (
    FAILURES,
    STOPS,
    can_end_here,
    is_stale,
    media_fields,
    metrics_of,
    pooled_output,
    stop_of,
    with_id,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """Delivery state of one request.

    num_read: number of its ids that the pipeline has read; ids after a stop are not.
    num_delivered: number of its ids that the caller has received. Writer: Delivery.
    """

    request: Request
    pipeline: TextPipeline
    prompt_token_ids: list[int]
    media_fields: Mapping[str, Any]
    has_reasoning_parser: bool
    has_tool_parser: bool
    num_read: int = 0
    num_delivered: int = 0
    send_idx: int = 0
    is_valid: bool | None = None  # of a constraint, known at the end
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def waits_for_end(self) -> bool:
        """Whether no text is needed before the last token."""
        return not can_end_here(self.request)


class Delivery:
    """Turns token updates into outputs; holds the text state of every unfinished request.

    new_parser, new_tool_parser: build a request's parsers; None: the text is not parsed.
    parser_name, tool_parser_name: name of parser and plugin, for messages.
    matches: whether a text follows a constraint; None where requests have none.

    The deltas of a streamed request, joined, equal the output of the same request without
    streaming. The exception is a parser that raises: the last output then has all of the request's
    token_ids and, as `text`, all of its text unparsed. A streamed request ends at once; another one
    runs to its end, so that its text is complete.
    """

    def __init__(
        self,
        tokenizer: Any,
        new_parser: Callable[[], ReasoningParser] | None = None,
        parser_name: str = "",
        new_tool_parser: Callable[[], ToolParser] | None = None,
        tool_parser_name: str = "",
        matches: Matches | None = None,
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._sources = ParserSources(
            reasoning=new_parser and ParserSource(create=new_parser, name=parser_name),
            tools=new_tool_parser and ParserSource(create=new_tool_parser, name=tool_parser_name),
        )
        self._matches = matches
        self._progress: dict[str, _Progress] = {}

    def deliver(self, updates: Sequence[TokenUpdate]) -> tuple[RequestOutput, ...]:
        """Returns the outputs of one step, in the order of its updates.

        A request without streaming has one output, at its end. An output with finished=True is the
        last of its request, whose state is dropped.
        """
        outputs = (self._deliver_one(update) for update in updates)
        return tuple(output for output in outputs if output is not None)

    def _deliver_one(self, update: TokenUpdate) -> RequestOutput | None:
        if update.request.wanted is not None:
            return pooled_output(update)
        progress = self._progress.get(update.request.request_id)
        if progress is None:
            if is_stale(update):
                return None
            progress = self._begin(update.request)
        progress.logprobs += map(self._with_texts, update.logprobs)
        progress.prompt_logprobs += (
            None if entry is None else self._with_texts(entry) for entry in update.prompt_logprobs
        )
        reason = self._advance(progress, update)
        if reason is not None:
            self._progress.pop(update.request.request_id)
            return self._last_output(progress, update, reason)
        has_news = update.request.stream and progress.num_read > progress.num_delivered
        return self._output(progress) if has_news else None

    def _begin(self, request: Request) -> _Progress:
        pipeline = TextPipeline(self._vocabulary, request, self._sources)
        if request.params.guided_decoding is not None:
            pipeline.keep_answer(tags_in(request.params.guided_decoding, self._vocabulary))
        self._progress[request.request_id] = progress = _Progress(
            request=request,
            pipeline=pipeline,
            prompt_token_ids=list(request.prompt_token_ids),
            media_fields=media_fields(request),
            has_reasoning_parser=self._sources.reasoning is not None,
            has_tool_parser=self._sources.tools is not None,
        )
        return progress

    def _advance(self, progress: _Progress, update: TokenUpdate) -> FinishReason | None:
        """Brings the text up to date; returns the finish reason when the request has ended."""
        reason = update.finish_reason
        if update.failure is not None and reason != "abort":
            reason = "error"
        pipeline = progress.pipeline
        if reason is not None or not progress.waits_for_end:
            token_ids, end = _text_ids(progress, reason)
            progress.num_read += pipeline.push(token_ids)
            if end is not None and not pipeline.is_stopped:
                pipeline.end_with(end)
                progress.num_read += 1
        is_broken = pipeline.failure is not None and update.request.stream
        if reason is not None or pipeline.is_stopped or is_broken:
            pipeline.finish(is_cut=reason != "stop" and not pipeline.is_stopped)
        else:
            return None
        if reason in ("abort", "error"):
            return reason
        if pipeline.failure is not None:
            return "error"
        return "stop" if pipeline.is_stopped else reason

    def _last_output(
        self, progress: _Progress, update: TokenUpdate, reason: FinishReason
    ) -> RequestOutput:
        failure = update.failure or progress.pipeline.failure or FAILURES.get(reason)
        if progress.request.params.guided_decoding is not None:
            broken = breach(progress.request, progress.pipeline, reason, self._matches)
            failure, progress.is_valid = failure or broken, broken is None
        if progress.pipeline.failure is not None:
            progress.num_delivered, progress.cumulative_logprob = 0, 0.0
        return self._output(progress, reason, failure, update.attention)

    def _output(
        self,
        progress: _Progress,
        reason: FinishReason | None = None,
        failure: RequestFailure | None = None,
        attention: NDArray[np.float32] | None = None,
    ) -> RequestOutput:
        request = progress.request
        is_last = reason is not None
        wants_prompt_logprobs = is_last and request.params.prompt_logprobs is not None
        completion = _completion(progress, reason, failure)
        if attention is not None:
            completion = replace(completion, attention=attention)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            item=request.item,
            prompt_token_ids=progress.prompt_token_ids,
            outputs=Completions([completion]),
            finished=is_last,
            metrics=metrics_of(request),
            num_cached_tokens=request.num_cached_tokens,
            **progress.media_fields,
            error_code=completion.error_code,
            error_msg=completion.error_msg,
            prompt_logprobs=tuple(progress.prompt_logprobs) if wants_prompt_logprobs else None,
        )

    def _with_texts(self, entry: TokenLogprobs) -> TokenLogprobs:
        return {
            token_id: Logprob(
                logprob=found.logprob,
                rank=found.rank,
                decoded_token=self._vocabulary.text_of(token_id),
            )
            for token_id, found in entry.items()
        }


def _text_ids(progress: _Progress, reason: FinishReason | None) -> tuple[list[int], int | None]:
    """Returns the ids that the pipeline has not read, and apart from them the id that ended the
    request, if one did."""
    request = progress.request
    token_ids = request.output_token_ids[progress.num_read :]
    ends = token_ids[-1:] if reason == "stop" else ()
    if any(end in request.eos_token_ids or end in request.params.stop_token_ids for end in ends):
        return token_ids[:-1], token_ids[-1]
    return token_ids, None


def _completion(
    progress: _Progress, reason: FinishReason | None, failure: RequestFailure | None
) -> CompletionOutput:
    """Returns what is new since the last output and advances the counters."""
    request, pipeline = progress.request, progress.pipeline
    is_unparsed = reason is not None and pipeline.failure is not None
    content, reasoning = pipeline.take("content"), pipeline.take("reasoning")
    calls = tuple(with_id(call, request.request_id) for call in pipeline.take_calls())
    if is_unparsed:
        content, reasoning, calls = pipeline.raw_text, "", ()
    elif reason == "stop" and pipeline.num_calls:
        reason = "tool_calls"
    wants_logprobs = request.params.logprobs is not None
    logprobs = tuple(progress.logprobs[progress.num_delivered : progress.num_read])
    for entry in logprobs:
        progress.cumulative_logprob += next(iter(entry.values())).logprob
    completion = CompletionOutput(
        index=request.index,
        send_idx=progress.send_idx,
        token_ids=request.output_token_ids[progress.num_delivered : progress.num_read],
        text=content,
        reasoning_content=reasoning if progress.has_reasoning_parser else None,
        finish_reason=reason,
        stop_reason=stop_of(request, pipeline.found_stop) if reason in STOPS else None,
        logprobs=logprobs if wants_logprobs else None,
        cumulative_logprob=progress.cumulative_logprob if wants_logprobs else None,
        tool_calls=calls if progress.has_tool_parser else None,
        is_valid=progress.is_valid,
        error_code=OK if failure is None else failure.code,
        error_msg=None if failure is None else failure.message,
    )
    progress.num_delivered = progress.num_read
    progress.send_idx += 1
    return completion
