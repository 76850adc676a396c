"""Runs a workload on a model and measures it:

load --> first token --> single requests --> warm-up --> rounds --> (one profiled round)
     --> peak memory --> machine rates
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from mmdeploy_llm.client.llm import LLM
from mmdeploy_llm.errors import ConfigError, RequestError
from mmdeploy_llm.hooks import Checkpoint, hookimpl
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.values.options.weight_formats import quantization_name
from mmdeploy_llm.values.outputs.metrics import StepStats
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.weights.folder import read_checkpoint, resolve_model
from mmdeploy_llm.weights.stored_head import follow_stored_head

from .cost import MediaFlops, ModelCost, kv_block_bytes, model_cost
from .machine import Machine, Precision, measure_machine, peak_memory
from .profile import Profile, Profiler
from .results import Alone, BenchResult, BenchSettings, Limit, Memory, Round
from .works import BenchRequest, Workload

NUM_ALONE = 3  # requests that run alone; their median is reported
NUM_WARM_UP = 4  # requests before the rounds
FIRST_SEED = 1000  # seed of the first request outside the rounds

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requests:
    """All requests of a measurement, no two alike. rounds: the measured rounds, followed by the
    profiled one, if any."""

    warm_up: Sequence[BenchRequest]
    alone: Sequence[BenchRequest]
    rounds: Sequence[Sequence[BenchRequest]]


class StepLog:
    """Collects the statistics of every step, as a plugin of the engine."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    @hookimpl
    def on_step(self, stats: StepStats) -> None:
        """Implements the hook on_step."""
        self.steps.append(stats)


def run_bench(settings: BenchSettings, notify: Notify) -> BenchResult:
    """Runs the benchmark. notify: called with a line of text at the start of each stage.

    Raises as LLM does, and RequestError when a request of the workload fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        checkpoint = follow_stored_head(
            read_checkpoint(resolve_model(settings.model, settings.options.get("revision")))
        )
        work = _workload(settings, checkpoint, Path(folder))
        rounds = [work.round(seed) for seed in range(settings.num_rounds + settings.is_profiled)]
        warm_up = replace(work, num_requests=NUM_WARM_UP).round(FIRST_SEED)
        alone = [work.alone(FIRST_SEED + 1 + i) for i in range(NUM_ALONE + 1)]
        making = time.perf_counter() - begin
        notify("loading the model")
        with LLM(model=settings.model, **{"quiet": True, **settings.options}) as llm:
            with _advising(llm, settings, checkpoint):
                _answer_alone(llm, alone[0])
            loading = time.perf_counter() - settings.begun - making
            requests = _Requests(warm_up=warm_up, alone=alone[1:], rounds=rounds)
            return _measure(llm, settings, checkpoint, requests, loading, notify)


@contextmanager
def _advising(llm: LLM, settings: BenchSettings, checkpoint: Checkpoint) -> Iterator[None]:
    """Adds to the error of a model that does not read the prompts of the workload what to do."""
    try:
        yield
    except RequestError as error:
        architectures = checkpoint.config.architectures or ()
        media = llm.plugins.model_for(architectures, checkpoint.config).media
        if "image" in media and settings.work == "text":
            advice = "the prompts of the workloads vl and photo have a picture"
        elif "image" not in media and settings.work != "text":
            advice = "the workload text has no pictures"
        else:
            advice = ""
        if "audio" in media and "image" not in media:
            advice = (
                "no workload has sounds; `mmdeploy-llm transcribe FOLDER` says how long it took"
            )
        raise RequestError(f"{error}; {advice}" if advice else str(error)) from error


def _workload(settings: BenchSettings, checkpoint: Checkpoint, folder: Path) -> Workload:
    config = checkpoint.config
    special = {
        value
        for source in (config, config.get_text_config())
        for name, value in source.to_dict().items()
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
    requests: _Requests,
    loading: float,
    notify: Notify,
) -> BenchResult:
    shapes = _shapes(llm, checkpoint)
    cost = model_cost(shapes)
    counter = MediaFlops(llm.model, shapes) if cost else None
    log = StepLog()
    llm.plugins.register(log, "bench")
    notify("one request alone")
    answers = [_answer_alone(llm, request, counter) for request in requests.alone]
    notify("warming up")
    _answer_all(llm, requests.warm_up)
    done, steps = [], []
    for number, measured in enumerate(requests.rounds[: settings.num_rounds], start=1):
        notify(f"round {number} of {settings.num_rounds}")
        log.steps.clear()
        done.append(_answer_all(llm, measured))
        steps.append(tuple(log.steps))
    memory = _memory(llm, settings, cost, steps[-1])
    profile = _profile(llm, requests.rounds[-1], notify) if settings.is_profiled else None
    limit = None
    if cost is not None and counter is not None:
        notify("measuring the machine")
        media_flops = counter.flops / len(requests.alone) * done[-1].num_images
        machine = _machine(llm, settings)
        limit = _limit(cost, machine, done[-1], steps[-1], media_flops)
    return BenchResult(
        work=settings.work,
        model=settings.model,
        device=llm.runtime.device,
        dtype=llm.runtime.dtype,
        quantization=llm.runtime.quantization,
        kv_cache_dtype=llm.runtime.kv_cache_dtype,
        max_num_seqs=llm.runtime.max_num_seqs,
        num_requests=settings.num_requests,
        num_threads=llm.runtime.num_threads,
        rounds=tuple(done),
        load_to_first_token=loading,
        alone=_median(answers),
        memory=memory,
        limit=limit,
        profile=profile,
    )


def _shapes(llm: LLM, checkpoint: Checkpoint) -> nn.Module:
    """Builds the model on the meta device, since a loaded model may have packed its weights.

    Raises ConfigError for a model in other processes, which bench cannot inspect.
    """
    if llm.model is None:
        raise ConfigError(
            "bench inspects a model in its own process; leave out tensor_parallel_size and "
            "data_parallel_size"
        )
    spec = llm.plugins.model_for(checkpoint.config.architectures or (), checkpoint.config)
    with torch.device("meta"):
        return cast(nn.Module, llm.plugins.build(spec, checkpoint.config))


def _params(request: BenchRequest) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True)


def _answer_alone(llm: LLM, request: BenchRequest, counter: MediaFlops | None = None) -> Alone:
    """Runs one request as a stream. counter: counts the media encoder's arithmetic meanwhile."""
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


def _profile(llm: LLM, requests: Sequence[BenchRequest], notify: Notify) -> Profile:
    notify("profiling a round")
    profiler = Profiler(llm)
    with profiler.watching():
        _answer_all(llm, requests)
    return profiler.profile()


def _memory(
    llm: LLM, settings: BenchSettings, cost: ModelCost | None, steps: Sequence[StepStats]
) -> Memory:
    """Returns the memory figures. steps: those of a round; after its last step all blocks of its
    requests are free."""
    runtime = llm.runtime
    num_blocks = steps[-1].num_free_blocks - min(step.num_free_blocks for step in steps)
    assert llm.model is not None, "_shapes has raised otherwise"
    block = kv_block_bytes(llm.model, runtime.kv_cache_dtype, runtime.block_size)
    precision = _precision(llm, settings)
    return Memory(
        peak=peak_memory(torch.device(runtime.device)),
        kv_cache=num_blocks * block,
        weights=None if cost is None else cost.weight_bytes(runtime.dtype, precision),
    )


def _precision(llm: LLM, settings: BenchSettings) -> Precision:
    """Returns the precision of the matrix products with weights."""
    name = quantization_name(settings.options.get("quantization"))
    return str(name or llm.runtime.dtype)


def _machine(llm: LLM, settings: BenchSettings) -> Machine:
    is_cpu = llm.runtime.device == "cpu"
    kernels = level = None
    if is_cpu and settings.options.get("native_kernels") is not False:
        try:
            kernels = native.load(level=settings.options.get("cpu_level"))
            level = kernels.cpu_level
        except native.BuildError:  # the engine has logged a warning and runs without them too
            kernels = level = None
    device = torch.device(llm.runtime.device)
    return measure_machine(device, _precision(llm, settings), kernels, level)


def _limit(
    cost: ModelCost,
    machine: Machine,
    done: Round,
    steps: Sequence[StepStats],
    media_flops: float,
) -> Limit:
    seconds = cost.seconds(steps, media_flops, machine)
    return Limit(machine=machine, seconds=seconds, share=seconds / done.seconds)
