"""Executor: whoever carries out the plans of one engine.

Engine --plan--> Runner                              in this process, a direct call
Engine --plan--> DistributedRunner --> N x Runner    in processes that share the model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mmdeploy_llm.plan import StepPlan, StepResult
from mmdeploy_llm.runtime_config import RuntimeConfig

from .kv_cache import KVCacheShape


class Executor(Protocol):
    """Runner, and what stands for several of them."""

    def run(self, plan: StepPlan) -> StepResult:
        """Carries out a plan. Raises WorkerDiedError when it can carry out none any more."""
        ...

    def close(self) -> None:
        """Lets go of processes and devices; `run` is not called again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the other rooms must know of an executor: the options as they were resolved where it
    computes, a block of its KV cache (of one rank) and how many there are."""

    runtime: RuntimeConfig
    shape: KVCacheShape
    num_blocks: int
