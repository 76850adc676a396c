"""Measures the time of a decode step outside the model with N sequences: step_overhead.py [-n 32].

Runs the bundled model and subtracts the time of its forward and logits from the time of each step.
The rest is scheduling, preparing inputs and the attention's index tensors, sampling, detokenizing
and observers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from models_here import check_model

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.hooks import hookimpl


class Clock:
    """Adds up the time spent in the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Any) -> Any:
        """Returns `function` with its time added to `seconds`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


class Observer:
    """Records the time outside the model of every step that decodes exactly `num_sequences`
    tokens."""

    def __init__(self, clock: Clock, num_sequences: int) -> None:
        self.clock = clock
        self.num_sequences = num_sequences
        self.overheads: list[float] = []

    @hookimpl
    def on_step(self, stats: Any) -> None:
        inside, self.clock.seconds = self.clock.seconds, 0.0
        is_decode = stats.num_scheduled_tokens == stats.num_scheduled_requests == self.num_sequences
        if is_decode:
            total = stats.plan_time + stats.run_time + stats.deliver_time
            self.overheads.append(1000 * (total - inside))


def main() -> None:
    """Prints the median and the 10 % and 90 % quantiles over the decode steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", type=int, default=32, help="sequences")
    parser.add_argument("--model", default="shapes-vl")
    args = parser.parse_args()
    check_model(parser, args.model)
    llm = LLM(model=args.model, max_num_seqs=args.n, num_threads=1)
    model, clock = llm.model, Clock()
    model.forward, model.logits = clock.wrap(model.forward), clock.wrap(model.logits)
    observer = Observer(clock, args.n)
    llm.plugins.register(observer, name="step-overhead")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm.generate([[21, 22, 23 + i] for i in range(args.n)], params, use_tqdm=False)
    low, *_, high = statistics.quantiles(observer.overheads, n=10)
    median = statistics.median(observer.overheads)
    spread = f"10%..90%: {low:.3f}..{high:.3f}"
    print(f"{args.n} sequences: median {median:.3f} ms outside the model ({spread})")


if __name__ == "__main__":
    main()
