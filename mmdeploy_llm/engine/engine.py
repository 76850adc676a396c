"""Engine: runs requests step by step; a step is five calls in a straight line, to three rooms. The
requests come from the fourth, intake, which it does not know.

plan -> compute -> commit -> deliver -> release
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from mmdeploy_llm.engine.runner.executor import Started
from mmdeploy_llm.errors import WorkerDiedError
from mmdeploy_llm.hooks import EngineInfo, PluginManager, StepStats
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.request import Request
from mmdeploy_llm.values.outputs.metrics import EngineStats
from mmdeploy_llm.values.outputs.request_output import RequestOutput
from mmdeploy_llm.values.plan import RequestFailure, StepPlan, StepResult, TokenUpdate

from .delivery.delivery import Delivery
from .delivery.summary import record_of
from .runner.executor import ComputeHost, Executor
from .schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Engine:
    """Runs requests until they finish. `add` and `step` are called by one thread, `abort`
    and `stats` by any."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Executor,
        delivery: Delivery,
        plugins: PluginManager,
        info: EngineInfo,
        host: ComputeHost | None = None,
    ) -> None:
        """host: the process's settings during a step; None when other processes compute."""
        self.info = info
        self._host = host
        self._scheduler = scheduler
        self._runner = runner
        self._started: Started | None = None  # the next step, where it is in flight already
        self._delivery = delivery
        self._plugins = plugins
        self._requests: dict[str, Request] = {}
        self._inbox: list[str] = []
        self._inbox_lock = threading.Lock()
        self._is_closed = False
        self._death: WorkerDiedError | None = None
        plugins.notify("on_engine_start", info=info)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return self._scheduler.has_work

    @property
    def death(self) -> WorkerDiedError | None:
        """Why no step can be computed any more; None while steps can. Once it is set, steps end
        their requests with this error."""
        return self._death

    def add(self, request: Request) -> None:
        """Queues a request; `step` returns its outputs."""
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends these requests in the next `step`, which returns their last outputs."""
        with self._inbox_lock:
            self._inbox.extend(request_ids)

    def drop_adapter(self, key: str) -> None:
        """Frees the memory of an adapter that no request uses, in the next step."""
        self._scheduler.drop_adapter(key)

    def stats(self) -> EngineStats:
        """Returns the engine's counters. Any thread may call it, also during a step."""
        return self._scheduler.stats()

    def step(self) -> tuple[RequestOutput, ...]:
        """Runs one step and returns its outputs. A failure becomes the error output of the requests
        that it affects."""
        with nullcontext() if self._host is None else self._host.computing():
            return self._step()

    def _step(self) -> tuple[RequestOutput, ...]:
        begin = time.perf_counter()
        ended = self._end_early()
        plan = self._scheduler.plan(time.time()) if self._started is None else self._started.plan
        planned = time.perf_counter()
        updates = ended + self._compute(plan)
        ran = time.perf_counter()
        outputs = self._delivery.deliver(updates)
        self._scheduler.release(outputs)
        self._report(plan, updates, outputs, (begin, planned, ran, time.perf_counter()))
        return outputs

    def close(self) -> None:
        """Closes the runner, lets go of it and with it of the model and the caches, and notifies
        observers. Requests are not aborted: no step follows that could return their outputs."""
        if not self._is_closed:
            self._is_closed, self._started = True, None
            self._runner.close()
            del self._runner
            if self._host is not None:
                self._host.close()
            self._plugins.notify("on_engine_stop", info=self.info)

    def _end_early(self) -> tuple[TokenUpdate, ...]:
        with self._inbox_lock:
            request_ids, self._inbox = self._inbox, []
        aborted = self._scheduler.abort(request_ids) if request_ids else ()
        return aborted + self._scheduler.expire(time.monotonic())

    def _compute(self, plan: StepPlan) -> tuple[TokenUpdate, ...]:
        try:
            result = self._result_of(plan)
        except WorkerDiedError as error:
            if self._death is None:
                self._death = error
                logger.error("the engine cannot continue: %s", error)
            return self._scheduler.fail(plan, RequestFailure(code=error.code, message=str(error)))
        except Exception as error:
            logger.exception("a step failed as a whole")
            message = f"the engine failed in this step: {error_text(error)}"
            return self._scheduler.fail(plan, RequestFailure(code=500, message=message))
        return self._scheduler.commit(plan, result, time.time())

    def _result_of(self, plan: StepPlan) -> StepResult:
        """Returns the step's result. Starts the next step before it waits for this one, where the
        executor and the scheduler allow it."""
        started, self._started = self._started or self._runner.start(plan), None
        following = self._scheduler.plan_next(plan) if started.can_follow else None
        if following is not None:
            self._started = self._runner.start(following, started)
        return started.finish()

    def _report(
        self,
        plan: StepPlan,
        updates: Sequence[TokenUpdate],
        outputs: Sequence[RequestOutput],
        times: tuple[float, float, float, float],
    ) -> None:
        for output in outputs:
            if output.finished:
                request = self._requests.pop(output.request_id)
                self._plugins.notify("on_request_finished", record=record_of(request, output))
        begin, planned, ran, delivered = times
        stats = self._scheduler.stats()
        self._plugins.notify(
            "on_step",
            stats=StepStats(
                step_id=plan.step_id,
                num_scheduled_tokens=plan.num_tokens,
                num_scheduled_requests=len(plan.scheduled),
                num_sampled_tokens=sum(len(update.new_token_ids) for update in updates),
                num_encoded_media=len(plan.encode),
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_free_blocks=stats.num_free_blocks,
                num_preemptions=stats.num_preemptions,
                plan_time=planned - begin,
                run_time=ran - planned,
                deliver_time=delivered - ran,
            ),
        )
