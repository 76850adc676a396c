"""Executor: runs the step plans of one engine.

Engine --plan--> Runner                              in this process, a direct call
Engine --plan--> DistributedRunner --> N x Runner    in processes that share the model
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mmdeploy_llm.layers.attention.cache_memory import KVCacheShape
from mmdeploy_llm.layers.pooling.abilities import GENERATES, Abilities
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A step that was started. Steps are finished in the order in which they were started.

    finish: waits for the step and returns its result; called once.
    can_follow: whether the next step may be started before this one is finished.
    token_ids: the tokens that this step samples, on the device, one for each request of the plan,
        in order; None where the next step gets them in another way.
    """

    plan: StepPlan
    finish: Callable[[], StepResult]
    can_follow: bool
    token_ids: Tensor | None = None


def deferred(plan: StepPlan, run: Callable[[StepPlan], StepResult]) -> Started:
    """Returns a step that `finish` computes as a whole, for executors that cannot overlap steps."""
    return Started(plan=plan, finish=lambda: run(plan), can_follow=False)


class ComputeHost(Protocol):
    """The process that computes, as engine.startup.host.Host keeps its settings."""

    def computing(self) -> AbstractContextManager[None]:
        """Returns the context of a step."""

    def close(self) -> None:
        """Puts the settings back."""


class Executor(Protocol):
    """Runs step plans, in this process or through one process per rank."""

    @property
    def can_overlap(self) -> bool:
        """Whether a step may ever be started before the previous one is finished."""

    def start(self, plan: StepPlan, before: Started | None = None) -> Started:
        """Starts a step; `Started.finish` returns its result.

        before: the previous step, if it is not finished yet. It must have `can_follow`, and all its
        requests continue decoding in this step, in the same order. Both this and `finish` raise
        WorkerDiedError when no step can be computed any more.
        """

    def run(self, plan: StepPlan) -> StepResult:
        """Starts a step, finishes it and returns its result."""

    def close(self) -> None:
        """Releases processes and devices; no step is started afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """Says of an executor what the rest of the engine must know.

    runtime: the options as they were resolved in the process that computes.
    shape: one block of the KV cache; under tensor parallelism, of one rank's.
    num_blocks: blocks in the KV cache.
    media_size: see hooks.contracts.media_size.
    num_state_rows: rows of states; 0 for a model without states.
    num_window_blocks: blocks of the layers with a window; 0 for a model without such layers.
    long_after: see forward.ForwardInputs.is_long. abilities: of the model.
    """

    runtime: RuntimeConfig
    shape: KVCacheShape
    num_blocks: int
    media_size: int
    num_state_rows: int = 0
    num_window_blocks: int = 0
    long_after: int | None = None
    abilities: Abilities = GENERATES
