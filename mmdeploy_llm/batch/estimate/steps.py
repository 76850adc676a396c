"""Measures what a step of the engine costs, and so how long any number of prompts takes.

    seconds of a step = fixed + token * sampled tokens + prefill * prompt tokens + media * items

The steps of a few prompts differ in all of these, so that the four costs can be told apart. A step
of few sequences costs nearly as much as one of many: without this, the end of a small sample, where
one long answer is computed alone, would make the whole run look several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmdeploy_llm.hooks import hookimpl
from mmdeploy_llm.values.outputs.metrics import StepStats

NEARLY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Prompts to compute: sums over all of them.

    longest: output tokens of the longest answer. preprocess: seconds of one intake thread.
    """

    num_items: int
    prompt_tokens: float
    output_tokens: float
    num_media: float
    longest: float
    preprocess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The engine: most sequences at once, and the threads of the intake. filled: see
    `share_filled`."""

    max_seqs: int
    num_threads: int
    filled: float = 1.0


class StepLog:
    """Collects the statistics of every step until it is closed, as a plugin of the engine."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []
        self._is_open = True

    def close(self) -> None:
        """Collects no more."""
        self._is_open = False

    @hookimpl
    def on_step(self, stats: StepStats) -> None:
        """Implements the hook on_step."""
        if self._is_open:
            self.steps.append(stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step, as the module says."""

    fixed: float
    token: float
    prefill: float
    media: float

    @classmethod
    def of(cls, steps: Sequence[StepStats]) -> StepCosts | None:
        """Fits the costs to steps; None without any."""
        rows = [
            (
                1.0,
                step.num_sampled_tokens,
                max(0, step.num_scheduled_tokens - step.num_sampled_tokens),
                step.num_encoded_media,
            )
            for step in steps
        ]
        if not rows:
            return None
        times = [step.plan_time + step.run_time + step.deliver_time for step in steps]
        found = _not_negative(np.array(rows, dtype=float), np.array(times))
        return cls(fixed=found[0], token=found[1], prefill=found[2], media=found[3])

    def seconds(self, work: Work, machine: Machine) -> float:
        """Returns the seconds of all steps, or of preparing media where that takes longer. What
        is prepared during a step on the same cores makes the step longer, and is in its cost."""
        at_once = max(1.0, machine.filled * min(machine.max_seqs, work.num_items))
        # At the end of the run the longest answers are computed with few others.
        num_steps = max(work.output_tokens / at_once + work.longest / 2, work.longest)
        engine = (
            self.fixed * num_steps
            + self.token * work.output_tokens
            + self.prefill * work.prompt_tokens
            + self.media * work.num_media
        )
        intake = work.preprocess / machine.num_threads
        return max(engine, intake)


def share_filled(steps: Sequence[StepStats]) -> float:
    """Returns which share of the places for sequences steps use, from the first to the last that
    uses nearly all: the place of one that has ended is empty until the next is prepared, and
    prompts, which are prepared at the same time, begin in different steps."""
    used = [step.num_scheduled_requests for step in steps]
    most = max(used, default=0)
    full = [number for number, own in enumerate(used) if own >= NEARLY * most]
    between = used[full[0] : full[-1] + 1] if most else []
    return sum(between) / (len(between) * most) if between else 1.0


def _not_negative(rows: np.ndarray, times: np.ndarray) -> list[float]:
    """Returns the least squares solution without negative values: columns that would get one are
    left out, the most negative one first."""
    left = [column for column in range(rows.shape[1]) if rows[:, column].any()]
    while left:
        found = np.linalg.lstsq(rows[:, left], times, rcond=None)[0]
        if (found >= 0).all():
            return [
                float(found[left.index(column)]) if column in left else 0.0
                for column in range(rows.shape[1])
            ]
        del left[int(found.argmin())]
    return [float(times.mean()), 0.0, 0.0, 0.0]
