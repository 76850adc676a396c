"""The messages between DistributedRunner and the processes of its ranks.

engine --Step----> rank --Started or Done-->  engine
       --Finish-->      --Done----------->
                        --Barrier-------->    before work that some ranks may be unable to do
       <bool------
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, replace
from typing import Any, Literal

from mmdeploy_llm.values.plan import ScheduledTokens, StepPlan, StepResult

from .executor import ExecutorInfo

StepMode = Literal["run", "start", "follow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMessage:
    """A plan to run or to start.

    rows: plan.scheduled as plain tuples, which halves the time to pickle; empty in `plan` itself.
    mode: "run": start it and finish it. "start": start it; unfinished steps are abandoned.
        "follow": start it while the last one that was started is unfinished.
    """

    plan: StepPlan
    rows: list[tuple[Any, ...]]
    mode: StepMode

    @staticmethod
    def of(plan: StepPlan, mode: StepMode) -> StepMessage:
        """Packs a plan into a message."""
        rows = [
            (
                item.request_id,
                item.start,
                item.num_tokens,
                item.new_block_ids,
                item.samples,
                item.drafts,
                item.new_window_ids,
                item.state_rows,
            )
            for item in plan.scheduled
        ]
        return StepMessage(plan=replace(plan, scheduled=()), rows=rows, mode=mode)

    def unpacked(self) -> StepPlan:
        """Returns the plan as it was before it was packed."""
        scheduled = tuple(
            ScheduledTokens(
                request_id=request_id,
                start=start,
                num_tokens=num_tokens,
                new_block_ids=new_block_ids,
                samples=samples,
                drafts=drafts,
                new_window_ids=new_window_ids,
                state_rows=state_rows,
            )
            for (
                request_id,
                start,
                num_tokens,
                new_block_ids,
                samples,
                drafts,
                new_window_ids,
                state_rows,
            ) in self.rows
        )
        return replace(self.plan, scheduled=scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishMessage:
    """Asks for the result of the first step that was started and is not finished."""

    step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyMessage:
    """A rank has loaded its model and allocated its memory."""

    info: ExecutorInfo
    can_overlap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedMessage:
    """A rank has started a step. can_follow: see overlap.Started."""

    step_id: int
    can_follow: bool

    @property
    def checksum(self) -> int:
        """A number that must be equal on all ranks; otherwise the run ends."""
        return int(self.can_follow)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneMessage:
    """A rank has finished a step. checksum: of its result; must be equal on all ranks, otherwise
    the run ends. result: sent by rank 0 only."""

    step_id: int
    checksum: int
    result: StepResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a rank has come: the number of its exchanges, and the kind of its error, if any."""

    num_exchanges: int
    has_raised: bool
    is_out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierMessage:
    """A rank waits until all ranks are at its position. The answer is True, or False when any rank
    has a problem. problem: "" for none."""

    position: Position
    problem: str


def checksum_of(result: StepResult) -> int:
    """Returns a checksum of all sampled tokens and of which requests failed."""
    token_ids = array("q", result.sampled.values())
    for later in result.later.values():
        token_ids.extend(later)
    request_ids = ",".join((*result.sampled, *result.vectors, *result.errors))
    return zlib.crc32(token_ids.tobytes(), zlib.crc32(request_ids.encode()))
