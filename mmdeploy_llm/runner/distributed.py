"""One model on several devices (tensor parallel): a process for each rank, all of them children.

    engine --plan, pickled once--> rank 0   Runner on its part of the model  --> result
                              \\--> rank 1   Runner on its part of the model  --> check sum of it
                                            sums and gathers between them: parallel.ranks

Every rank carries out every plan in slots of its own and samples the same tokens of the same
logits: the plan is all that travels. No rank lives in the caller's process, so that this one never
waits in an exchange that a dead rank has left: it waits for messages, and the end of a process is
one of them. Then it ends the others.

Where the ranks' runners can start a step before the one in front is finished (RunsAhead), so can
all of them together: each start and each finish is a message to all and an answer of all, so that
they come in the same order on every rank.

    host     start n+1     finish n, commit, deliver     start n+2     finish n+1 ...
    rank     ..launch n+1  wait for n ....               ..launch n+2  wait for n+1
    device   ........ step n ........ | ........ step n+1 ........ | ..

What a rank raises on all ranks, at the same exchange, is an error of its requests as it is on one
device. What it raises on some of them only (out of memory, mostly) leaves the others waiting in an
exchange for ever: that ends the run too, as does a rank that is silent for too long.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Literal, Protocol

from mmdeploy_llm.errors import MMDeployLLMError, WorkerDiedError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.parallel import (
    Channel,
    Meeting,
    Message,
    Ranks,
    Worker,
    close_all,
    interrupted_later,
)
from mmdeploy_llm.plan import ScheduledTokens, StepPlan, StepResult

from .ahead import RunsAhead, Started, runs_ahead
from .executor import Executor, Facts
from .out_of_memory import is_out_of_memory
from .peers import Peers

FAULT_SECONDS = 20.0  # for all ranks to come to the same error
LOAD_SECONDS = 1800.0  # for a rank to be ready, when others are
STEP_SECONDS = 600.0  # for a step on a card; for a rank, when others are done with a step
DIFFERENT = (
    "the ranks have come to different results in one step; this is an error of the model or the "
    "device: use tensor_parallel_size = 1, and report it"
)


class Built(Protocol):
    """What a rank's process has: its executor and the facts of it."""

    @property
    def runner(self) -> Executor: ...

    @property
    def facts(self) -> Facts: ...


class RankBlueprint(Protocol):
    """What a rank is built from; picklable. Start-up defines it."""

    @property
    def device(self) -> str: ...


BuildRank = Callable[[Any, Ranks, Peers], Built]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A plan, as _packed. how: run it, or start it: anew, where steps that were started and not
    finished count no more, or behind the last of these."""

    plan: StepPlan
    rows: list[tuple[Any, ...]]
    how: Literal["run", "start", "follow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finish:
    """Waits for the first step that was started and is not finished."""

    step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    facts: Facts
    can_run_ahead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A rank has started a step. See Started."""

    step_id: int
    can_follow: bool

    @property
    def check(self) -> int:
        """See _Done."""
        return int(self.can_follow)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A rank has carried out a plan. check: of what came of it. result: rank 0's alone."""

    step_id: int
    check: int
    result: StepResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a rank is when it asks how the others fare: after so many exchanges, with an error of
    which kind."""

    num_calls: int
    has_raised: bool
    is_out_of_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """What a rank tells the others before it goes on. problem: "" for none."""

    place: _Place
    problem: str


class DistributedRunner:
    """The runners of all ranks, as one. See Executor and RunsAhead."""

    def __init__(self, blueprints: Sequence[RankBlueprint], build: BuildRank) -> None:
        """blueprints: one for each rank. build: a picklable function that each rank's process calls
        with its blueprint.

        Returns when all ranks are ready. Raises what `build` raises, and WorkerDiedError.
        """
        self._death: WorkerDiedError | None = None
        self._workers: list[Worker] = []
        # NCCL looks into it all the time, and most of all when something is wrong.
        folder = tempfile.mkdtemp(prefix="mmdeploy-llm-")
        self._forget_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            for rank, blueprint in enumerate(blueprints):
                meeting = Meeting(
                    path=f"{folder}/ranks", rank=rank, size=len(blueprints), device=blueprint.device
                )
                entry = partial(serve_rank, blueprint=blueprint, meeting=meeting, build=build)
                self._workers.append(Worker(f"rank {rank}", entry, is_quiet=rank > 0))
            ready: list[_Ready] = self._gathered(None, LOAD_SECONDS)
        except BaseException:
            self._kill()
            raise
        self.facts: Facts = ready[0].facts
        self.can_run_ahead = all(item.can_run_ahead for item in ready)
        is_on_cards = any(blueprint.device != "cpu" for blueprint in blueprints)
        self._patience = STEP_SECONDS if is_on_cards else None

    def run(self, plan: StepPlan) -> StepResult:
        """See Executor."""
        return self._result(self._said(_packed(plan, "run")))

    def start(self, plan: StepPlan, before: Started | None = None) -> Started:
        """See RunsAhead. A step that was started before and not finished, such as one that Ctrl-C
        has taken from the caller, counts no more if this one does not follow it."""
        said: list[_Launched] = self._said(_packed(plan, "start" if before is None else "follow"))
        finish = partial(self._finish, plan.step_id)
        return Started(plan=plan, finish=finish, can_follow=said[0].can_follow)

    def close(self) -> None:
        """See Executor."""
        close_all(self._workers)
        self._forget_folder()
        self._death = self._death or WorkerDiedError("this engine is closed")

    def _finish(self, step_id: int) -> StepResult:
        return self._result(self._said(_Finish(step_id=step_id)))

    def _result(self, done: Sequence[_Done]) -> StepResult:
        result = done[0].result
        assert result is not None, "rank 0 sends it"
        return result

    def _said(self, value: Any) -> list[Any]:
        """What each rank answers; no rank is left with half of it. Raises WorkerDiedError once the
        ranks have ended."""
        if self._death is not None:
            raise self._death
        with interrupted_later():
            try:
                return self._exchanged(value)
            except MMDeployLLMError as found:
                text = error_text(found)
                self._death = found if isinstance(found, WorkerDiedError) else WorkerDiedError(text)
                self._kill()
                raise self._death from None
            except KeyboardInterrupt:
                self._death = WorkerDiedError("the ranks were ended in a step by two interrupts")
                self._kill()
                raise

    def _exchanged(self, value: Any) -> list[Any]:
        message = Message(value)
        try:
            for worker in self._workers:
                worker.send_message(message)
        finally:
            message.close()
        said = self._gathered(self._patience, STEP_SECONDS)
        if len({(item.step_id, item.check) for item in said}) > 1:
            raise WorkerDiedError(DIFFERENT)
        return said

    def _gathered(self, patience: float | None, longer: float) -> list[Any]:
        """What each rank says next, words to the others apart, which are answered. patience:
        seconds for the first of them, None for any; longer: for each of the others behind it."""
        said: dict[int, Any] = {}
        words: dict[int, _Word] = {}
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while len(said) < len(self._workers):
            silent = [link for link, rank in ranks.items() if rank not in said | words]
            seconds = longer if said else patience
            if any(word.problem for word in words.values()):
                seconds = FAULT_SECONDS
            ready = wait(silent, seconds) if silent else []
            for link in ready:
                rank = ranks[link]  # type: ignore[index]
                value = self._workers[rank].receive()
                (words if isinstance(value, _Word) else said)[rank] = value
            if words:
                self._settle(words, said, is_over=not ready)
            elif not ready:
                rank = ranks[silent[0]]
                raise WorkerDiedError(
                    f"rank {rank} has said nothing for {seconds:g} seconds: its device, or what "
                    "the ranks exchange, is stuck"
                )
        return [said[rank] for rank in range(len(self._workers))]

    def _settle(self, words: dict[int, _Word], said: dict[int, Any], *, is_over: bool) -> None:
        """Lets the ranks go on once all are at the same place. Raises WorkerDiedError when they
        cannot come there any more."""
        places = {word.place for word in words.values()}
        if len(words) == len(self._workers) and len(places) == 1:
            is_fine = not any(word.problem for word in words.values())
            words.clear()
            for worker in self._workers:
                worker.send(is_fine)
        elif said or is_over or len(places) > 1:
            rank, word = min(words.items(), key=lambda item: (not item[1].problem, item[0]))
            raise WorkerDiedError(
                f"the model failed on rank {rank} and not on all ranks, which cannot go on "
                f"without it: {word.problem or 'the ranks are at different places'}"
            )

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._forget_folder()


class _LostError(BaseException):
    """This rank has nobody to go on with. No Exception, so that nothing but the end of the
    process follows."""


class _Others:
    """See Peers."""

    def __init__(self, ranks: Ranks, channel: Channel) -> None:
        self._ranks, self._channel = ranks, channel

    def raised(self, error: BaseException) -> None:
        """See Peers."""
        self._ask(error_text(error), has_raised=True, is_out_of_memory=is_out_of_memory(error))

    def agree(self, is_fine: bool) -> bool:
        """See Peers."""
        problem = "" if is_fine else "it could not do what others could"
        return self._ask(problem, has_raised=False, is_out_of_memory=False)

    def _ask(self, problem: str, *, has_raised: bool, is_out_of_memory: bool) -> bool:
        place = _Place(
            num_calls=self._ranks.num_calls,
            has_raised=has_raised,
            is_out_of_memory=is_out_of_memory,
        )
        try:
            self._channel.send(_Word(place=place, problem=problem))
            return bool(self._channel.receive())  # once all ranks have said the same
        except (EOFError, OSError) as error:
            raise _LostError from error


def serve_rank(
    channel: Channel, *, blueprint: RankBlueprint, meeting: Meeting, build: BuildRank
) -> None:
    """A rank's process: plans in, results out, until the channel ends."""
    ranks = meeting.join()
    built = build(blueprint, ranks, _Others(ranks, channel))
    rank = _Rank(built.runner, speaks=ranks.rank == 0)
    channel.send(_Ready(facts=built.facts, can_run_ahead=rank.ahead is not None))
    while True:
        channel.send(rank.answer(channel.receive()))


class _Rank:
    """The runner of one rank and the steps that it has started. speaks: whether it gives the
    results."""

    def __init__(self, runner: Executor, *, speaks: bool) -> None:
        self.ahead: RunsAhead | None = runs_ahead(runner)
        self._runner = runner
        self._speaks = speaks
        self._open: deque[Started] = deque()  # started and not finished

    def answer(self, said: _Step | _Finish) -> _Launched | _Done:
        """Does what is said."""
        if isinstance(said, _Finish):
            started = self._open.popleft()
            assert started.plan.step_id == said.step_id, "steps are finished in order"
            return self._done(started.finish())
        plan = _unpacked(said.plan, said.rows)
        if said.how == "run":
            return self._done(self._runner.run(plan))
        return self._started(plan, follows=said.how == "follow")

    def _started(self, plan: StepPlan, *, follows: bool) -> _Launched:
        assert self.ahead is not None, "the others know whether it is"
        while self._open and not follows:
            self._open.popleft().finish()  # nobody waits for it any more
        started = self.ahead.start(plan, self._open[-1] if follows else None)
        self._open.append(started)
        return _Launched(step_id=plan.step_id, can_follow=started.can_follow)

    def _done(self, result: StepResult) -> _Done:
        own = result if self._speaks else None
        return _Done(step_id=result.step_id, check=_check(result), result=own)


def _packed(plan: StepPlan, how: Literal["run", "start", "follow"]) -> _Step:
    """The plan with what it has most of as plain tuples, which takes half the time to pickle."""
    rows = [
        (item.request_id, item.start, item.num_tokens, item.new_block_ids, item.samples)
        for item in plan.scheduled
    ]
    return _Step(plan=replace(plan, scheduled=()), rows=rows, how=how)


def _unpacked(plan: StepPlan, rows: Iterable[tuple[Any, ...]]) -> StepPlan:
    scheduled = tuple(
        ScheduledTokens(
            request_id=request_id,
            start=start,
            num_tokens=num_tokens,
            new_block_ids=new_block_ids,
            samples=samples,
        )
        for request_id, start, num_tokens, new_block_ids, samples in rows
    )
    return replace(plan, scheduled=scheduled)


def _check(result: StepResult) -> int:
    """The same on all ranks if they are in step."""
    token_ids = array("q", result.sampled.values())
    request_ids = ",".join((*result.sampled, *result.errors))
    return zlib.crc32(token_ids.tobytes(), zlib.crc32(request_ids.encode()))
