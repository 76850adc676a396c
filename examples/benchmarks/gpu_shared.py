"""Code that the parts of gpu.py share: sizes, an engine with step statistics, timers."""

from __future__ import annotations

import json
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.cli.bench.cost import (
    VALUE_BYTES,
    MediaFlops,
    ModelCost,
    kv_block_bytes,
    model_cost,
)
from mmdeploy_llm.cli.bench.machine import Machine
from mmdeploy_llm.cli.bench.run import StepLog
from mmdeploy_llm.values.outputs.metrics import StepStats
from mmdeploy_llm.weights.folder import read_checkpoint

DTYPE = "bfloat16"
LOWEST_ID = 40  # lowest token id in prompts; special tokens lie below


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the workloads. image: pixels per side. decode: number of timed tokens."""

    is_tiny: bool
    batch: int
    context: int
    step_tokens: int
    decode: int
    overhead_batch: int
    num_images: int
    image: int
    output: int
    copy_bytes: int
    product: int


REAL = Sizes(
    is_tiny=False,
    batch=64,
    context=1024,
    step_tokens=8192,
    decode=96,
    overhead_batch=32,
    num_images=256,
    image=448,
    output=64,
    copy_bytes=4 * 2**30,
    product=8192,
)
TINY = Sizes(
    is_tiny=True,
    batch=4,
    context=48,
    step_tokens=128,
    decode=32,
    overhead_batch=4,
    num_images=3,
    image=56,
    output=4,
    copy_bytes=2**22,
    product=128,
)


class Part:
    """The environment of a part: device, sizes, folder, and the output of rows."""

    def __init__(self, device: str, sizes: Sizes, folder: Path) -> None:
        self.device, self.sizes, self.folder = device, sizes, folder
        self.graphs = "no CUDA graphs"
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        for name in ("graphs", "runner"):
            logging.getLogger(f"mmdeploy_llm.engine.runner.{name}").addFilter(self.keep)

    def keep(self, record: logging.LogRecord) -> bool:
        """Log filter that remembers the message about CUDA graphs and passes every record."""
        if "CUDA graphs" in record.getMessage():
            self.graphs = record.getMessage()
        return True

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def row(self, work: str, **values: Any) -> None:
        """Prints a row. values: measured, limit (texts), share (fraction of the limit reached),
        value, target, note, images (per second, for the comparison)."""
        print("ROW " + json.dumps({"work": work, **values}), flush=True)

    def say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def wait(self) -> None:
        """Waits until the device has finished all submitted work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    @cached_property
    def machine(self) -> Machine:
        """The rates that the part "machine" measured."""
        found = json.loads((self.folder / "machine.json").read_text())
        return Machine(precision=DTYPE, **found)

    def llm(self, model: Path, **options: Any) -> LLM:
        """Builds an engine with random weights. Blocks the plugin for videos, which needs av; a
        GPU host may lack it."""
        begin = time.perf_counter()
        llm = LLM(
            model=str(model),
            load_format="dummy",
            dtype=DTYPE,
            device=self.device,
            guided_decoding_backend="off",
            enable_prefix_caching=False,
            num_threads=None if self.is_cuda else 1,
            **options,
        )
        self.say(f"the engine started in {time.perf_counter() - begin:.1f} s: {llm.runtime}")
        return llm


class Measured:
    """An engine with the statistics of its steps and the lower bound of their cost."""

    def __init__(self, part: Part, llm: LLM, model: Path) -> None:
        self.part, self.llm = part, llm
        self.log = StepLog()
        llm.plugins.register(self.log, "gpu-bench")
        checkpoint = read_checkpoint(model)
        spec = llm.plugins.model_for(checkpoint.config.architectures, checkpoint.config)
        with torch.device("meta"):
            shapes = llm.plugins.build(spec, checkpoint.config)
        cost = model_cost(shapes)
        assert cost is not None, "models of this package are CausalLMs"
        self.cost: ModelCost = cost
        self.counter = MediaFlops(llm.model, shapes)
        self.vocab_size = int(checkpoint.config.get_text_config().vocab_size)

    @property
    def kv_token_bytes(self) -> int:
        return kv_block_bytes(self.llm.model, DTYPE, 1)

    def generate(self, lengths: Sequence[int], num_tokens: int) -> list[StepStats]:
        """Runs prompts of these lengths, num_tokens generated each; returns the steps."""
        rng = random.Random(len(lengths))
        highest = min(15_000, self.vocab_size)
        prompts = [[rng.randrange(LOWEST_ID, highest) for _ in range(size)] for size in lengths]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.log.steps.clear()
        self.check(self.llm.generate(prompts, params, use_tqdm=False))
        return list(self.log.steps)

    def check(self, outputs: Sequence[Any]) -> None:
        for output in outputs:
            if not output.is_ok:
                raise RuntimeError(f"a request failed: {output.error_msg}")

    def decode_seconds(self, batch: int, context: int, num_tokens: int) -> float:
        """Returns the median time of steps in which the whole batch decodes, without the first
        two, which warm up."""
        steps = self.generate([context] * batch, num_tokens)
        decodes = [
            seconds(step)
            for step in steps
            if step.num_scheduled_tokens == step.num_scheduled_requests == batch
        ]
        if not decodes:
            raise RuntimeError(f"in none of {len(steps)} steps all {batch} requests decoded")
        return statistics.median(decodes[2:] or decodes)

    def decode(self, work: str, batch: int, context: int, target: float) -> None:
        """Prints a row: a decode step's time, and the time to read weights and KV cache."""
        num_tokens = self.part.sizes.decode
        self.generate([context] * batch, 4)  # warm-up; requests need not overlap here
        taken = self.decode_seconds(batch, context, num_tokens)
        cost = self.cost
        experts = sum(each.num_values * min(1.0, batch * each.share) for each in cost.experts)
        weights = (cost.dense + experts + cost.head) * VALUE_BYTES[DTYPE]
        cached = batch * (context + num_tokens / 2) * self.kv_token_bytes
        least = (weights + cached) / self.part.machine.bandwidth
        self.part.row(
            work,
            measured=f"{1000 * taken:.2f} ms, {batch / taken:.0f} tokens/s",
            limit=f"{1000 * least:.2f} ms for {(weights + cached) / 1e9:.2f} GB",
            share=least / taken,
            target=target,
        )


def seconds(step: StepStats) -> float:
    """Returns the whole time of a step."""
    return step.plan_time + step.run_time + step.deliver_time


@contextmanager
def busy(part: Part, model: Any) -> Iterator[Callable[[], float]]:
    """Yields a function that returns the seconds of device compute inside the block; on a CPU, the
    seconds inside the model."""
    if not part.is_cuda:
        clock = [0.0]
        with timed(model, "forward", clock), timed(model, "logits", clock):
            yield lambda: clock[0]
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield lambda: kernel_microseconds(profile.key_averages()) / 1e6
        part.wait()


def kernel_microseconds(events: Iterable[Any]) -> float:
    """Sums the device time of a profile's kernels. Host events also carry the device time of the
    kernels that they launched, which would count it twice."""
    return sum(
        each.self_device_time_total
        for each in events
        if each.device_type is torch.autograd.DeviceType.CUDA and not each.is_user_annotation
    )


@contextmanager
def timed(model: Any, name: str, clock: list[float]) -> Iterator[None]:
    function = getattr(model, name)

    def wrapper(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args)
        finally:
            clock[0] += time.perf_counter() - begin

    setattr(model, name, wrapper)
    try:
        yield
    finally:
        delattr(model, name)


def copy_rate(part: Part) -> float:
    """Returns bytes per second of a copy, counting reads and writes."""
    source = torch.zeros(part.sizes.copy_bytes // 2, dtype=torch.bfloat16, device=part.device)
    target = torch.empty_like(source)
    return rate(part, lambda: target.copy_(source), 2 * source.nbytes)


def rate(part: Part, call: Callable[[], object], amount: float) -> float:
    """Returns `amount` per second of the fastest of twelve calls."""
    best = float("inf")
    for _ in range(12):
        part.wait()
        begin = time.perf_counter()
        call()
        part.wait()
        best = min(best, time.perf_counter() - begin)
    return amount / best
