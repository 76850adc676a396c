"""The process of one rank: receives messages of DistributedRunner, answers with results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.layers.attention.out_of_memory import is_out_of_memory
from mmdeploy_llm.system.processes import Channel
from mmdeploy_llm.system.sharding import Meeting, Ranks
from mmdeploy_llm.system.sharding.peers import Peers
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.plan import StepPlan, StepResult

from .executor import Executor, ExecutorInfo, Started
from .rank_messages import (
    BarrierMessage,
    DoneMessage,
    FinishMessage,
    Position,
    ReadyMessage,
    StartedMessage,
    StepMessage,
    checksum_of,
)


class Built(Protocol):
    """The result of BuildRank: the rank's executor and what the engine must know of it."""

    @property
    def runner(self) -> Executor: ...

    @property
    def info(self) -> ExecutorInfo: ...


BuildRank = Callable[[RuntimeConfig, Ranks, Peers], Built]


def serve_rank(
    channel: Channel, *, runtime: RuntimeConfig, meeting: Meeting, build: BuildRank
) -> None:
    """Builds the rank's runner and answers messages until the channel is closed."""
    ranks = meeting.join()
    built = build(runtime, ranks, ChannelPeers(ranks, channel))
    rank = Rank(built.runner, sends_results=ranks.rank == 0)
    channel.send(ReadyMessage(info=built.info, can_overlap=built.runner.can_overlap))
    while True:
        channel.send(rank.answer(channel.receive()))


class Rank:
    """Runs the steps of one rank, and holds those that are started and not finished."""

    def __init__(self, runner: Executor, *, sends_results: bool) -> None:
        self._runner = runner
        self._sends_results = sends_results
        self._unfinished: deque[Started] = deque()

    def answer(self, message: StepMessage | FinishMessage) -> StartedMessage | DoneMessage:
        """Carries out a message and returns the answer to it."""
        if isinstance(message, FinishMessage):
            started = self._unfinished.popleft()
            assert started.plan.step_id == message.step_id, "steps are finished in order"
            return self._done(started.finish())
        plan = message.unpacked()
        if message.mode == "run":
            return self._done(self._runner.run(plan))
        return self._start(plan, follows=message.mode == "follow")

    def _start(self, plan: StepPlan, *, follows: bool) -> StartedMessage:
        while self._unfinished and not follows:
            self._unfinished.popleft().finish()  # abandoned: nobody waits for it any more
        started = self._runner.start(plan, self._unfinished[-1] if follows else None)
        self._unfinished.append(started)
        return StartedMessage(step_id=plan.step_id, can_follow=started.can_follow)

    def _done(self, result: StepResult) -> DoneMessage:
        return DoneMessage(
            step_id=result.step_id,
            checksum=checksum_of(result),
            result=result if self._sends_results else None,
        )


class RankLostError(BaseException):
    """The engine's process has ended. A BaseException, so that no handler of errors catches it and
    this process ends."""


class ChannelPeers:
    """The other ranks, reached through DistributedRunner."""

    def __init__(self, ranks: Ranks, channel: Channel) -> None:
        self._ranks, self._channel = ranks, channel

    def raised(self, error: BaseException) -> None:
        """Reports the error, and waits until all ranks have reported one; see Peers."""
        self._wait(error_text(error), has_raised=True, is_out_of_memory=is_out_of_memory(error))

    def agree(self, is_fine: bool) -> bool:
        """Reports `is_fine` and returns whether it is True on all ranks; see Peers."""
        problem = "" if is_fine else "it could not do what other ranks could"
        return self._wait(problem, has_raised=False, is_out_of_memory=False)

    def _wait(self, problem: str, *, has_raised: bool, is_out_of_memory: bool) -> bool:
        """Waits until all ranks are at the same position; returns whether none has a problem."""
        position = Position(
            num_exchanges=self._ranks.num_calls,
            has_raised=has_raised,
            is_out_of_memory=is_out_of_memory,
        )
        try:
            self._channel.send(BarrierMessage(position=position, problem=problem))
            return bool(self._channel.receive())
        except (EOFError, OSError) as error:
            raise RankLostError from error
