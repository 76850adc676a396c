"""Started: a step that was started and is not finished yet, so that steps can overlap.

    host     start n+1     finish n, commit, deliver     start n+2     finish n+1 ...
    device   ........ step n ........ | ........ step n+1 ........ | ..

The device never waits for the host: step n+1 reads the tokens that step n samples where they are,
on the device. A request that turns out to end with step n is computed in step n+1 nevertheless,
and its token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

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
