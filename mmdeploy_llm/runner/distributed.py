"""One model on several devices (tensor parallel): a process for each rank, all of them children.

    engine --plan, pickled once--> rank 0   Runner on its part of the model  --> result
                              \\--> rank 1   Runner on its part of the model  --> check sum of it
                                            sums and gathers between them: parallel.ranks

Every rank carries out every plan in slots of its own and samples the same tokens of the same
logits: the plan is all that travels. No rank lives in the caller's process, so that this one never
waits in an exchange that a dead rank has left: it waits for messages, and the end of a process is
one of them. Then it ends the others.

A model that raises on all ranks, at the same exchange, is an error of its requests as it is on one
device. One that raises on some of them only (out of memory, mostly) leaves the others waiting in an
exchange for ever: that ends the run too.
"""

from __future__ import annotations

import signal
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Protocol

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.errors import MMDeployLLMError, WorkerDiedError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.parallel import Channel, Meeting, Message, Ranks, Worker
from mmdeploy_llm.plan import ScheduledTokens, StepPlan, StepResult

from .executor import Executor, Facts

FAULT_SECONDS = 20.0  # for all ranks to come to the same error


class Built(Protocol):
    """What a rank's process has: its executor and the facts of it."""

    @property
    def runner(self) -> Executor: ...

    @property
    def facts(self) -> Facts: ...


BuildRank = Callable[[EngineConfig, Ranks, Callable[[Any], Any]], Built]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A rank has carried out a plan. check: of what came of it. result: rank 0's alone."""

    step_id: int
    check: int
    result: StepResult | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A rank's model has raised, after so many exchanges, and waits for what the others say."""

    num_calls: int
    error: str


class DistributedRunner:
    """The runners of all ranks, as one. See Executor."""

    def __init__(self, configs: Sequence[EngineConfig], build: BuildRank) -> None:
        """configs: of each rank. build: a picklable function that each rank's process calls.

        Returns when all ranks are ready. Raises what `build` raises, and WorkerDiedError.
        """
        self._death: WorkerDiedError | None = None
        self._is_in_step = False  # ranks may have a plan that others have not
        self._workers: list[Worker] = []
        with TemporaryDirectory(prefix="mmdeploy-llm-") as folder:
            try:
                for rank, config in enumerate(configs):
                    meeting = Meeting(
                        path=f"{folder}/ranks", rank=rank, size=len(configs), device=config.device
                    )
                    entry = partial(serve_rank, config=config, meeting=meeting, build=build)
                    self._workers.append(Worker(f"rank {rank}", entry, is_quiet=rank > 0))
                self.facts: Facts = self._gathered()[0]
            except BaseException:
                self._kill()
                raise

    def run(self, plan: StepPlan) -> StepResult:
        """See Executor."""
        if self._death is not None:
            raise self._death
        try:
            with _interrupted_later():
                return self._run(plan)
        except MMDeployLLMError as found:
            self._kill()
            text = error_text(found)
            self._death = found if isinstance(found, WorkerDiedError) else WorkerDiedError(text)
            raise self._death from None
        except KeyboardInterrupt:
            if not self._is_in_step:
                raise
            self._kill()
            self._death = WorkerDiedError("the ranks were ended in a step by two interrupts")
            raise

    def close(self) -> None:
        """See Executor."""
        for worker in self._workers:
            worker.connection.close()  # all of them end at the same time
        for worker in self._workers:
            worker.close()
        self._death = self._death or WorkerDiedError("this engine is closed")

    def _run(self, plan: StepPlan) -> StepResult:
        message = Message(_packed(plan))
        self._is_in_step = True
        for worker in self._workers:
            worker.send_message(message)
        message.close()
        done: list[_Done] = self._gathered()
        self._is_in_step = False
        if len({item.check for item in done}) > 1:
            raise WorkerDiedError(
                "the ranks have come to different results in one step; this is an error of the "
                "model or the device: use tensor_parallel_size = 1, and report it"
            )
        result = done[0].result
        assert result is not None, "rank 0 sends it"
        return result

    def _gathered(self) -> list[Any]:
        """What each rank says next, faults apart, which are settled."""
        said: dict[int, Any] = {}
        faults: dict[int, _Fault] = {}
        ranks = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        while len(said) < len(self._workers):
            silent = [link for link, rank in ranks.items() if rank not in said | faults]
            ready = wait(silent, FAULT_SECONDS if faults else None) if silent else []
            for link in ready:
                rank = ranks[link]  # type: ignore[index]
                value = self._workers[rank].receive()
                (faults if isinstance(value, _Fault) else said)[rank] = value
            if faults:
                self._settle(faults, said, is_over=not ready)
        return [said[rank] for rank in range(len(self._workers))]

    def _settle(self, faults: dict[int, _Fault], said: dict[int, Any], *, is_over: bool) -> None:
        """Lets the ranks go on once all have come to the same fault. Raises WorkerDiedError when
        they cannot any more."""
        if len(faults) == len(self._workers) and len({f.num_calls for f in faults.values()}) == 1:
            faults.clear()
            for worker in self._workers:
                worker.send(True)
        elif said or is_over or len({f.num_calls for f in faults.values()}) > 1:
            rank, fault = min(faults.items())
            raise WorkerDiedError(
                f"the model failed on rank {rank} and not on all ranks, which cannot go on "
                f"without it: {fault.error}"
            )

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C waits for the end of the block: a step of which some ranks have heard would keep them
    waiting for the others. A second one does not wait."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where signals never arrive
        return
    before = signal.getsignal(signal.SIGINT)
    received: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1 and callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if len(received) == 1 and callable(before):
        before(*received[0])


class _LostError(BaseException):
    """This rank has nobody to go on with. No Exception, so that nothing but the end of the
    process follows."""


class _WatchedModel:
    """A rank's model. What it raises goes on only where it was raised on all ranks."""

    def __init__(self, model: Any, ranks: Ranks, channel: Channel) -> None:
        self._model, self._ranks, self._channel = model, ranks, channel
        for name in ("forward", "logits", "encode_media", "positions"):
            if hasattr(model, name):
                setattr(self, name, partial(self._call, getattr(model, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except FAULTS as error:
            try:
                self._channel.send(_Fault(num_calls=self._ranks.num_calls, error=error_text(error)))
                self._channel.receive()  # once all ranks have said the same
            except (EOFError, OSError):
                raise _LostError from error
            raise


def serve_rank(
    channel: Channel, *, config: EngineConfig, meeting: Meeting, build: BuildRank
) -> None:
    """A rank's process: plans in, results out, until the channel ends."""
    ranks = meeting.join()

    def watched(model: Any) -> Any:
        named = type(type(model).__name__, (_WatchedModel,), {})  # as messages call it
        return named(model, ranks, channel)

    built = build(config, ranks, watched)
    channel.send(built.facts)
    while True:
        plan = _unpacked(*channel.receive())
        result = built.runner.run(plan)
        own = result if ranks.rank == 0 else None
        channel.send(_Done(step_id=plan.step_id, check=_check(result), result=own))


def _packed(plan: StepPlan) -> tuple[StepPlan, list[tuple[Any, ...]]]:
    """The plan with what it has most of as plain tuples, which takes half the time to pickle."""
    rows = [
        (item.request_id, item.start, item.num_tokens, item.new_block_ids, item.samples)
        for item in plan.scheduled
    ]
    return replace(plan, scheduled=()), rows


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
