"""Runs a workload on a model and measures it:

load --> first token --> requests alone --> warm-up --> rounds --> (one more, profiled)
     --> memory read --> machine measured
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from mmdeploy_llm import native
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import Checkpoint, hookimpl
from mmdeploy_llm.intake.checkpoint import read_checkpoint, resolve_model
from mmdeploy_llm.llm import LLM
from mmdeploy_llm.metrics import StepStats
from mmdeploy_llm.params import SamplingParams

from .cost import MediaFlops, ModelCost, kv_block_bytes, model_cost
from .machine import Machine, Precision, measure_machine, peak_memory
from .profile import Profile, Profiler
from .results import Alone, BenchResult, BenchSettings, Limit, Memory, Round
from .works import BenchRequest, Workload

NUM_ALONE = 3  # requests alone, medians of which are reported
NUM_WARM_UP = 4  # requests, before the rounds
FIRST_SEED = 1000  # of requests outside the rounds

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Requests, all of them different. rounds: those that are measured, and one for the profile."""

    warm_up: Sequence[BenchRequest]
    alone: Sequence[BenchRequest]
    rounds: Sequence[Sequence[BenchRequest]]


class StepLog:
    """Keeps what every step tells; an observer of the engine and its own only writer."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    @hookimpl
    def on_step(self, stats: StepStats) -> None:
        """See the hook."""
        self.steps.append(stats)


def run_bench(settings: BenchSettings, tell: Tell) -> BenchResult:
    """Measures. tell: gets a line when something begins. Raises as LLM does, and for a request
    that fails."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        checkpoint = read_checkpoint(
            resolve_model(settings.model, settings.options.get("revision"))
        )
        work = _workload(settings, checkpoint, Path(folder))
        rounds = [work.round(seed) for seed in range(settings.num_rounds + settings.is_profiled)]
        warm_up = replace(work, num_requests=NUM_WARM_UP).round(FIRST_SEED)
        alone = [work.alone(FIRST_SEED + 1 + i) for i in range(NUM_ALONE + 1)]
        making = time.perf_counter() - begin
        tell("loading the model")
        with LLM(model=settings.model, **settings.options) as llm:
            _answer_alone(llm, alone[0])
            loading = time.perf_counter() - settings.begun - making
            asked = _Asked(warm_up=warm_up, alone=alone[1:], rounds=rounds)
            return _measure(llm, settings, checkpoint, asked, loading, tell)


def _workload(settings: BenchSettings, checkpoint: Checkpoint, folder: Path) -> Workload:
    config = checkpoint.config
    special = {
        value
        for part in (config, config.get_text_config())
        for name, value in part.to_dict().items()
        if name.endswith("token_id") and isinstance(value, int)
    }
    return Workload(
        name=settings.work,
        num_requests=settings.num_requests,
        vocab_size=int(config.get_text_config().vocab_size),
        special_ids=frozenset(special),
        folder=folder,
    )


def _measure(
    llm: LLM,
    settings: BenchSettings,
    checkpoint: Checkpoint,
    asked: _Asked,
    loading: float,
    tell: Tell,
) -> BenchResult:
    shapes = _shapes(llm, checkpoint)
    cost = model_cost(shapes)
    counter = MediaFlops(llm.model, shapes) if cost else None
    log = StepLog()
    llm.plugins.register(log, "bench")
    tell("one request alone")
    answers = [_answer_alone(llm, request, counter) for request in asked.alone]
    tell("warming up")
    _answer_all(llm, asked.warm_up)
    done, steps = [], []
    for number, requests in enumerate(asked.rounds[: settings.num_rounds], start=1):
        tell(f"round {number} of {settings.num_rounds}")
        log.steps.clear()
        done.append(_answer_all(llm, requests))
        steps.append(tuple(log.steps))
    memory = _memory(llm, settings, cost, steps[-1])
    profile = _profile(llm, asked.rounds[-1], tell) if settings.is_profiled else None
    limit = None
    if cost is not None and counter is not None:
        tell("measuring the machine")
        media_flops = counter.flops / len(asked.alone) * done[-1].num_images
        machine = _machine(llm, settings)
        limit = _limit(cost, machine, done[-1], steps[-1], media_flops)
    return BenchResult(
        work=settings.work,
        model=settings.model,
        device=llm.runtime.device,
        dtype=llm.runtime.dtype,
        quantization=settings.options.get("quantization"),
        kv_cache_dtype=llm.runtime.kv_cache_dtype,
        max_num_seqs=llm.runtime.max_num_seqs,
        num_threads=llm.runtime.num_threads,
        rounds=tuple(done),
        load_to_first_token=loading,
        alone=_median(answers),
        memory=memory,
        limit=limit,
        profile=profile,
    )


def _shapes(llm: LLM, checkpoint: Checkpoint) -> nn.Module:
    """The model without memory for its weights. A loaded one may have them in other layouts.

    Raises ConfigError for a model in other processes: the bench looks into the one that computes.
    """
    if llm.model is None:
        raise ConfigError(
            "bench looks into the process that computes; leave out tensor_parallel_size and "
            "data_parallel_size"
        )
    spec = llm.plugins.model_for(checkpoint.config.architectures or ())
    with torch.device("meta"):
        return cast(nn.Module, llm.plugins.build(spec, checkpoint.config))


def _params(request: BenchRequest) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)


def _answer_alone(llm: LLM, request: BenchRequest, counter: MediaFlops | None = None) -> Alone:
    """One request as a stream. counter: counts while it runs."""
    begin = time.perf_counter()
    times: list[float] = []
    num_prompt = num_output = 0
    with counter.counting() if counter else nullcontext():
        for output in llm.stream(request.prompt, _params(request)):
            if not output.is_ok:
                raise RequestError(f"a request of the workload failed: {output.error_msg}")
            times.append(time.perf_counter())
            num_prompt = len(output.prompt_token_ids)
            num_output += len(output.outputs.token_ids)
    return Alone(
        first_token=times[0] - begin,
        per_output_token=(times[-1] - times[0]) / max(1, num_output - 1),
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
    )


def _median(answers: Sequence[Alone]) -> Alone:
    return Alone(
        first_token=statistics.median(answer.first_token for answer in answers),
        per_output_token=statistics.median(answer.per_output_token for answer in answers),
        num_prompt_tokens=answers[0].num_prompt_tokens,
        num_output_tokens=answers[0].num_output_tokens,
    )


def _answer_all(llm: LLM, requests: Sequence[BenchRequest]) -> Round:
    prompts = [request.prompt for request in requests]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, list(map(_params, requests)), use_tqdm=False)
    seconds = time.perf_counter() - begin
    for output in outputs:
        if not output.is_ok:
            raise RequestError(f"a request of the workload failed: {output.error_msg}")
    return Round(
        seconds=seconds,
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(output.outputs.token_ids) for output in outputs),
        num_images=sum(isinstance(prompt, dict) for prompt in prompts),
    )


def _profile(llm: LLM, requests: Sequence[BenchRequest], tell: Tell) -> Profile:
    tell("profiling a round")
    profiler = Profiler(llm)
    with profiler.watching():
        _answer_all(llm, requests)
    return profiler.profile()


def _memory(
    llm: LLM, settings: BenchSettings, cost: ModelCost | None, steps: Sequence[StepStats]
) -> Memory:
    """steps: of a round, at the end of which nothing runs."""
    runtime = llm.runtime
    num_blocks = steps[-1].num_free_blocks - min(step.num_free_blocks for step in steps)
    assert llm.model is not None, "_shapes sees to it"
    block = kv_block_bytes(llm.model, runtime.kv_cache_dtype, runtime.block_size)
    precision = _precision(llm, settings)
    return Memory(
        peak=peak_memory(torch.device(runtime.device)),
        kv_cache=num_blocks * block,
        weights=None if cost is None else cost.weight_bytes(runtime.dtype, precision),
    )


def _precision(llm: LLM, settings: BenchSettings) -> Precision:
    """Of the products with weights."""
    return settings.options.get("quantization") or cast(Precision, llm.runtime.dtype)


def _machine(llm: LLM, settings: BenchSettings) -> Machine:
    is_cpu = llm.runtime.device == "cpu"
    kernels = None
    if is_cpu and settings.options.get("native_kernels") is not False:
        try:
            kernels = native.load()
        except native.BuildError:  # the engine has warned, and runs without them too
            kernels = None
    return measure_machine(torch.device(llm.runtime.device), _precision(llm, settings), kernels)


def _limit(
    cost: ModelCost,
    machine: Machine,
    done: Round,
    steps: Sequence[StepStats],
    media_flops: float,
) -> Limit:
    seconds = cost.seconds(steps, media_flops, machine)
    return Limit(machine=machine, seconds=seconds, share=seconds / done.seconds)
