"""Steps that are started before the one in front of them is done, so that a device never waits for
the host.

    host     start n+1     finish n, commit, deliver     start n+2     finish n+1 ...
    device   ........ step n ........ | ........ step n+1 ........ | ..

Step n+1 takes the tokens that step n samples where they are, on the device. A request that step n
turns out to end is in step n+1 nevertheless, where its token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from mmdeploy_llm.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A step that the device was given. finish: waits for its result; called once, in the order of
    the starts. can_follow: whether the next step can be started before. token_ids: what that takes,
    on the device, one for each request of the plan, in order; None where others have it."""

    plan: StepPlan
    finish: Callable[[], StepResult]
    can_follow: bool
    token_ids: Tensor | None = None


class RunsAhead(Protocol):
    """An executor whose steps can be started before the one in front is finished."""

    can_run_ahead: bool

    def start(self, plan: StepPlan, before: Started | None = None) -> Started:
        """Gives the plan to the device. before: the step in front, not finished yet, whose requests
        all decode on in this one, in the same order."""
        ...


def runs_ahead(executor: Any) -> RunsAhead | None:
    """The executor, where its steps can be started ahead."""
    return executor if getattr(executor, "can_run_ahead", False) else None
