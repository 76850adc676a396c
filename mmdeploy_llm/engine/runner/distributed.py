"""DistributedRunner: one model on several devices (tensor parallelism), one child process per rank.

    engine --plan, pickled once--> rank 0   Runner on its shard of the model  --> result
                              \\--> rank 1   Runner on its shard of the model  --> checksum of it
                                            sums and gathers between them: system.sharding.ranks

Every rank carries out every plan in slots of its own and samples the same tokens from the same
logits: only plans and results travel. No rank lives in the caller's process, which therefore never
waits in an exchange that a dead rank has left: it waits for messages, notices when a process ends,
and then ends the others.

Where the ranks' runners can overlap steps, so can all of them together: each start and each finish
is a message to all ranks that all of them answer, so that they happen in the same order everywhere.

    host     start n+1     finish n, commit, deliver     start n+2     finish n+1 ...
    rank     ..launch n+1  wait for n ....               ..launch n+2  wait for n+1
    device   ........ step n ........ | ........ step n+1 ........ | ..

An error that all ranks raise after the same exchange fails its requests, as it does on one device.
An error on some of them only (out of memory, mostly) would leave the others waiting in an exchange
for ever: it ends the run, as does a rank that does not answer for too long.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from mmdeploy_llm.errors import MMDeployLLMError, WorkerDiedError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.system.processes import (
    Message,
    Worker,
    close_all,
    finalize_here,
    interrupted_later,
)
from mmdeploy_llm.system.sharding import Meeting
from mmdeploy_llm.values.options.runtime_config import RuntimeConfig
from mmdeploy_llm.values.plan import StepPlan, StepResult

from .executor import ExecutorInfo, Started, deferred
from .rank import BuildRank, serve_rank
from .rank_messages import (
    BarrierMessage,
    DoneMessage,
    FinishMessage,
    ReadyMessage,
    StartedMessage,
    StepMessage,
)

FAULT_SECONDS = 20.0  # for all ranks to report the same error
LOAD_SECONDS = 1800.0  # for a rank to be ready after another one is
STEP_SECONDS = 600.0  # for a step on a GPU; for a rank to finish a step after another one has
DIFFERENT = (
    "the ranks computed different results in one step; this is an error of the model or the "
    "device: use tensor_parallel_size = 1, and report it"
)


class DistributedRunner:
    """Runs step plans on all ranks, each in its own process. See Executor for the methods."""

    def __init__(self, runtimes: Sequence[RuntimeConfig], build: BuildRank) -> None:
        """runtimes: the options of each rank. build: a picklable function that each rank's process
        calls with them.

        Returns when all ranks are ready. Raises what `build` raises, and WorkerDiedError.
        """
        self._death: WorkerDiedError | None = None
        self._workers: list[Worker] = []
        # Holds the file through which ranks meet. It stays: NCCL reads it while the ranks run, and
        # when one of them fails.
        folder = tempfile.mkdtemp(prefix="mmdeploy-llm-")
        self._delete_folder = finalize_here(self, shutil.rmtree, folder, ignore_errors=True)
        try:
            for rank, runtime in enumerate(runtimes):
                meeting = Meeting(
                    path=f"{folder}/ranks", rank=rank, size=len(runtimes), device=runtime.device
                )
                entry = partial(serve_rank, runtime=runtime, meeting=meeting, build=build)
                self._workers.append(Worker(f"rank {rank}", entry, is_quiet=rank > 0))
            ready: list[ReadyMessage] = self._gather(None, LOAD_SECONDS)
        except BaseException:
            self._kill()
            raise
        self.info: ExecutorInfo = ready[0].info
        self.can_overlap = all(message.can_overlap for message in ready)
        is_on_gpus = any(runtime.device != "cpu" for runtime in runtimes)
        self._first_answer_seconds = STEP_SECONDS if is_on_gpus else None

    def run(self, plan: StepPlan) -> StepResult:
        """Runs a step on all ranks; see Executor."""
        return self.start(plan).finish()

    def start(self, plan: StepPlan, before: Started | None = None) -> Started:
        """Starts a step on all ranks; see Executor. Without `before`, unfinished steps are
        abandoned, such as a step whose caller was interrupted by Ctrl-C.

        Where steps cannot overlap, a step is one message and not two, sent by `finish`."""
        if not self.can_overlap:
            return deferred(plan, self._run_in_one_message)
        message = StepMessage.of(plan, "start" if before is None else "follow")
        answers: list[StartedMessage] = self._ask_all(message)
        finish = partial(self._finish, plan.step_id)
        return Started(plan=plan, finish=finish, can_follow=answers[0].can_follow)

    def close(self) -> None:
        """Ends the ranks' processes; later steps raise WorkerDiedError."""
        close_all(self._workers)
        self._delete_folder()
        self._death = self._death or WorkerDiedError("this engine is closed")

    def _run_in_one_message(self, plan: StepPlan) -> StepResult:
        return self._result(self._ask_all(StepMessage.of(plan, "run")))

    def _finish(self, step_id: int) -> StepResult:
        return self._result(self._ask_all(FinishMessage(step_id=step_id)))

    def _result(self, done: Sequence[DoneMessage]) -> StepResult:
        result = done[0].result
        assert result is not None, "rank 0 sends it"
        return result

    def _ask_all(self, value: Any) -> list[Any]:
        """Sends a message to all ranks and returns their answers, by rank. An interrupt is held
        back until all have answered, so that no rank misses the message. Raises WorkerDiedError
        once the ranks have ended."""
        if self._death is not None:
            raise self._death
        with interrupted_later():
            try:
                return self._exchange(value)
            except MMDeployLLMError as error:
                text = error_text(error)
                self._death = error if isinstance(error, WorkerDiedError) else WorkerDiedError(text)
                self._kill()
                raise self._death from None
            except KeyboardInterrupt:
                self._death = WorkerDiedError("the ranks were ended in a step by two interrupts")
                self._kill()
                raise

    def _exchange(self, value: Any) -> list[Any]:
        message = Message(value)
        try:
            for worker in self._workers:
                worker.send_message(message)
        finally:
            message.close()
        answers = self._gather(self._first_answer_seconds, STEP_SECONDS)
        if len({(answer.step_id, answer.checksum) for answer in answers}) > 1:
            raise WorkerDiedError(DIFFERENT)
        return answers

    def _gather(self, first_seconds: float | None, more_seconds: float) -> list[Any]:
        """Waits for the next answer of each rank, and handles barriers meanwhile. Raises
        WorkerDiedError when a rank ends or is too late.

        first_seconds: for the first answer; None: no limit. more_seconds: for each one after it.
        """
        answers: dict[int, Any] = {}
        barriers: dict[int, BarrierMessage] = {}
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while len(answers) < len(self._workers):
            silent = [link for link, rank in ranks.items() if rank not in answers | barriers]
            seconds = more_seconds if answers else first_seconds
            if any(message.problem for message in barriers.values()):
                seconds = FAULT_SECONDS
            ready = wait(silent, seconds) if silent else []
            for link in ready:
                rank = ranks[link]  # type: ignore[index]
                value = self._workers[rank].receive()
                (barriers if isinstance(value, BarrierMessage) else answers)[rank] = value
            if barriers:
                self._settle(barriers, answers, is_late=not ready)
            elif not ready:
                rank = ranks[silent[0]]
                raise WorkerDiedError(
                    f"rank {rank} has not answered for {seconds:g} seconds: its device, or an "
                    "exchange between the ranks, is stuck"
                )
        return [answers[rank] for rank in range(len(self._workers))]

    def _settle(
        self, barriers: dict[int, BarrierMessage], answers: dict[int, Any], *, is_late: bool
    ) -> None:
        """Lets the ranks continue once all are at the same position. Raises WorkerDiedError when
        that can no longer happen."""
        positions = {message.position for message in barriers.values()}
        if len(barriers) == len(self._workers) and len(positions) == 1:
            is_fine = not any(message.problem for message in barriers.values())
            barriers.clear()
            for worker in self._workers:
                worker.send(is_fine)
        elif answers or is_late or len(positions) > 1:
            rank, message = min(barriers.items(), key=lambda item: (not item[1].problem, item[0]))
            reason = message.problem or "the ranks are at different points of the step"
            raise WorkerDiedError(
                f"the model failed on rank {rank} and not on all ranks, which cannot continue "
                f"without it: {reason}"
            )

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._delete_folder()
