"""Computes the same requests in every way that an engine may choose, and compares the answers bit
for bit.

A way differs from ALONE only in what is computed together, and when; see Way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from mmdeploy_llm.engine.runner.runner import Runner
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.request_output import Logprob, TokenLogprobs
from mmdeploy_llm.values.plan import TokenUpdate

from .tracing import Trace

CHUNK = 13  # tokens in a step of Way.CHUNKS; at least one for each request


INFINITY = float("inf")


class Way(StrEnum):
    """How the requests are computed.

    ALONE: one after the other, each prompt in one step; all others are compared with it.
    BATCH: all at once. CHUNKS: all at once, with few tokens in a step, prompts and decoding mixed.
    PREFIX: all at once, a second time, with the KV blocks of the first.
    PREEMPTED: each twice at once, in a cache that is too small for both.
    THREADS: all at once, with another number of threads.
    """

    ALONE = "alone"
    BATCH = "in a batch"
    CHUNKS = "in chunks"
    PREFIX = "with prefix hits"
    PREEMPTED = "after a preemption"
    THREADS = "with other threads"


@dataclass(slots=True)
class Answer:
    """The answer to one request: an entry of log-probabilities for each of `token_ids`, and one for
    each prompt token but the first where the way computes the whole prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answers of one way compared with those of Way.ALONE.

    has_happened: whether the way was taken at all: chunks, prefix hits, preemptions.
    num_tokens, num_logprobs: what was compared. A request is compared up to its first other token.
    num_other_tokens, num_other_logprobs: those that differ. largest: the largest difference of two
    log-probabilities of one token.
    causes: names of the operations whose results differ first, in the order of the forward pass.
    """

    way: Way
    has_happened: bool
    num_tokens: int
    num_other_tokens: int
    num_logprobs: int
    num_other_logprobs: int
    largest: float
    causes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether not a bit differs."""
        return not self.num_other_tokens and not self.num_other_logprobs


class Ways:
    """Runs requests in every way on runners of one model.

    new_runner: returns a runner with the KV blocks of a SchedulerConfig.
    config: its KV cache holds all requests at once.
    requests: with max_tokens, `logprobs` and a seed; in the order of their arrival.
    """

    def __init__(
        self,
        new_runner: Callable[[SchedulerConfig], Runner],
        config: SchedulerConfig,
        requests: Sequence[Request],
    ) -> None:
        self._new_runner = new_runner
        self._config = replace(config, enable_prefix_caching=False)
        self._requests = requests
        self._num_requests = 0

    def compare(self, model: torch.nn.Module, ways: Sequence[Way]) -> Iterator[Comparison]:
        """Yields a comparison for each of `ways`. Where answers differ, runs both again and names
        the causes in `model`. Raises EngineError when a request fails."""
        alone = self.answers(Way.ALONE)
        for way in ways:
            found = self.answers(way)
            comparison = _compared(way, found, alone, has_happened=self._has_happened(way, found))
            if not comparison.is_same:
                comparison = replace(comparison, causes=self._causes(model, way))
            yield comparison

    def _causes(self, model: torch.nn.Module, way: Way) -> tuple[str, ...]:
        traces = Trace(model), Trace(model)
        for trace, one in zip(traces, (Way.ALONE, way), strict=True):
            with trace.watching():
                self.answers(one, trace)
        return traces[1].causes(traces[0])

    def answers(self, way: Way, trace: Trace | None = None) -> list[Answer]:
        """Computes all requests in this way, on a new runner."""
        if way is Way.PREEMPTED:
            return [self._preempted(index, trace) for index in range(len(self._requests))]
        config = self._config
        if way is Way.PREFIX:
            config = replace(config, enable_prefix_caching=True)
        if way is Way.CHUNKS:
            config = replace(config, max_num_batched_tokens=self._chunk)
        scheduler, runner = Scheduler(config), self._new_runner(config)
        every = range(len(self._requests))
        if way is Way.ALONE:
            return [self._run(scheduler, runner, [index], trace)[0] for index in every]
        if way is Way.PREFIX:
            self._run(scheduler, runner, every, None, has_prompts=False)
            return self._run(scheduler, runner, every, trace, has_prompts=False)
        with _other_threads(is_wanted=way is Way.THREADS):
            return self._run(scheduler, runner, every, trace)

    @property
    def _chunk(self) -> int:
        """Tokens in a step of Way.CHUNKS."""
        spans = [span for request in self._requests for span in request.media]
        largest = max((span.end - span.offset for span in spans), default=0)
        atomic = largest if self._config.atomic_media else 0
        return max(CHUNK, self._config.max_num_seqs, atomic)

    def _preempted(self, index: int, trace: Trace | None) -> Answer:
        """Computes a request twice at once, with KV blocks for one answer and both prompts."""
        request, size = self._requests[index], self._config.block_size
        num_prompt = len(request.prompt_token_ids)
        longest = num_prompt + (request.params.max_tokens or 0)
        # Enough for one whole answer, or for two prompts with a token each; and one block more.
        num_blocks = max(-(-longest // size), 2 * -(-(num_prompt + 1) // size)) + 1
        config = replace(self._config, num_blocks=num_blocks)
        scheduler, runner = Scheduler(config), self._new_runner(config)
        found = self._run(scheduler, runner, [index, index], trace)
        return max(found, key=lambda answer: answer.num_preemptions)

    def _has_happened(self, way: Way, answers: Sequence[Answer]) -> bool:
        if way is Way.PREFIX:
            return any(answer.num_cached_tokens for answer in answers)
        if way is Way.PREEMPTED:
            return any(answer.num_preemptions for answer in answers)
        if way is Way.CHUNKS:
            return any(len(each.prompt_token_ids) > self._chunk for each in self._requests)
        return True

    def _run(
        self,
        scheduler: Scheduler,
        runner: Runner,
        indices: Sequence[int],
        trace: Trace | None,
        *,
        has_prompts: bool = True,
    ) -> list[Answer]:
        """Computes requests together. has_prompts: with log-probabilities of the prompts, for which
        no prefix is taken from the cache."""
        found: dict[str, Answer] = {}
        latest: dict[int, str] = {}  # index -> request id: of two the second is preempted
        for index in indices:
            request = self._copy(self._requests[index], has_prompts and trace is None)
            found[request.request_id] = Answer()
            latest[index] = request.request_id
            scheduler.add(request)
        owners = {request_id: index for index, request_id in latest.items()}
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            if trace is not None:
                trace.begin(plan.scheduled, owners)
            result = runner.run(plan)
            for request_id, entries in result.prompt_logprobs.items():
                _add_prompt(found[request_id], entries)
            for update in scheduler.commit(plan, result, 0.0):
                _take(update, found[update.request.request_id])
        return list(found.values())

    def _copy(self, request: Request, has_prompts: bool) -> Request:
        self._num_requests += 1
        wanted = {"prompt_logprobs": 0 if has_prompts else None}
        return replace(
            request,
            request_id=str(self._num_requests),
            params=request.params.model_copy(update=wanted),
            arrival_time=float(self._num_requests),
            output_token_ids=[],
            block_ids=[],
        )


@contextmanager
def _other_threads(*, is_wanted: bool) -> Iterator[None]:
    """Computes with one thread in the block, or with two where there is one."""
    before = torch.get_num_threads()
    if is_wanted:
        torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _add_prompt(answer: Answer, entries: Sequence[TokenLogprobs | None]) -> None:
    """Adds the entries of a chunk of a prompt. The first one has None for its first token; it comes
    again after a preemption."""
    if entries and entries[0] is None:
        answer.prompt_logprobs.clear()
    answer.prompt_logprobs += [entry for entry in entries if entry is not None]


def _take(update: TokenUpdate, answer: Answer) -> None:
    if update.failure is not None:
        raise EngineError(f"a request failed: {update.failure.message}")
    answer.token_ids += update.new_token_ids
    answer.logprobs += update.logprobs
    answer.num_cached_tokens = update.request.num_cached_tokens
    answer.num_preemptions = update.request.num_preemptions


def _compared(
    way: Way, found: Sequence[Answer], alone: Sequence[Answer], *, has_happened: bool
) -> Comparison:
    num_tokens = num_other_tokens = 0
    pairs: list[tuple[TokenLogprobs, TokenLogprobs]] = []
    for one, other in zip(found, alone, strict=True):
        tokens = list(zip(one.token_ids, other.token_ids, strict=True))
        same = next((at for at, (a, b) in enumerate(tokens) if a != b), len(tokens))
        num_tokens += min(same + 1, len(tokens))
        num_other_tokens += same < len(tokens)
        pairs += zip(one.logprobs[:same], other.logprobs[:same], strict=True)
        if one.prompt_logprobs:
            pairs += zip(one.prompt_logprobs, other.prompt_logprobs, strict=True)
    gaps = [gap for pair in pairs for gap in _gaps(*pair)]
    return Comparison(
        way=way,
        has_happened=has_happened,
        num_tokens=num_tokens,
        num_other_tokens=num_other_tokens,
        num_logprobs=len(gaps),
        num_other_logprobs=sum(gap > 0 for gap in gaps),
        largest=max((gap for gap in gaps if gap < INFINITY), default=0.0),
    )


def _gaps(one: Mapping[int, Logprob], other: Mapping[int, Logprob]) -> Iterator[float]:
    """Yields the difference of each log-probability; infinite for a token that one of them
    lacks."""
    for token_id in {*one, *other}:
        if token_id not in one or token_id not in other:
            yield INFINITY
        else:
            yield abs(one[token_id].logprob - other[token_id].logprob)
