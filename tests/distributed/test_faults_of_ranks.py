"""Ranks that come to different ends of a step: with runners of our own in real processes."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.engine.runner import distributed
from mmdeploy_llm.engine.runner.distributed import DistributedRunner
from mmdeploy_llm.errors import WorkerDiedError
from mmdeploy_llm.system.sharding import Meeting
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.plan import RequestFailure, ScheduledTokens, StepPlan, StepResult

PLAIN, ALL, ONE, LATER, APART = "plain", "all", "one", "later", "apart"
OTHER, SILENT = "other", "silent"


class Model:
    """What it does is the id of the request."""

    def __init__(self, ranks):
        self.ranks = ranks

    def forward(self, what):
        total = int(self.ranks.sum(torch.ones(1)))
        if what == ALL or (what == ONE and self.ranks.rank == 1):
            raise ValueError(f"broken on {what}")
        if what == ONE:
            self.ranks.sum(torch.ones(1))  # never ends
        if what == LATER:
            if self.ranks.rank == 1:
                self.ranks.num_calls += 1
            raise ValueError("at another place")
        if what == OTHER:
            raise MemoryError("full") if self.ranks.rank else ValueError("at the same place")
        if what == SILENT and self.ranks.rank:
            time.sleep(1000)
        return total + (self.ranks.rank if what == APART else 0)


class Runner:
    """Answers as Runner does for a model that raises."""

    def __init__(self, model, peers):
        self.model, self.peers = model, peers

    can_overlap = False

    def run(self, plan):
        sampled, errors = {}, {}
        for item in plan.scheduled:
            try:
                sampled[item.request_id] = self.model.forward(item.request_id)
            except Exception as error:
                self.peers.raised(error)
                errors[item.request_id] = RequestFailure(code=500, message=str(error))
        return StepResult(step_id=plan.step_id, sampled=sampled, errors=errors)


def build(config, ranks, peers):
    return SimpleNamespace(runner=Runner(Model(ranks), peers), info=config.device)


def plan(*what):
    items = (ScheduledTokens(request_id=one, start=0, num_tokens=1) for one in what)
    return StepPlan(step_id=1, scheduled=tuple(items))


def new_runner():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.path.dirname(__file__))
        module = __import__("test_faults_of_ranks")
        return DistributedRunner([EngineConfig(model="m", device="cpu")] * 2, module.build)


@pytest.fixture
def runner():
    """Makes a runner for a test that ends its ranks."""
    runner = new_runner()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def lasting():
    """Makes a runner for tests after which the ranks go on."""
    runner = new_runner()
    yield runner
    runner.close()


@pytest.mark.full
@pytest.mark.parametrize("what", [ONE, LATER, OTHER])
def test_an_error_that_not_all_ranks_have(runner, what, monkeypatch):
    """The others wait in an exchange, or are elsewhere: nobody waits for ever."""
    monkeypatch.setattr(distributed, "FAULT_SECONDS", 1.0)
    with pytest.raises(WorkerDiedError, match=r"failed on rank \d and not on all ranks"):
        runner.run(plan(PLAIN, what))


@pytest.mark.full
def test_a_rank_that_does_not_answer(runner, monkeypatch):
    """The others are done with the step: it is stuck, and nobody waits for ever."""
    monkeypatch.setattr(distributed, "STEP_SECONDS", 1.0)
    with pytest.raises(WorkerDiedError, match="rank 1 has not answered for 1 seconds"):
        runner.run(plan(SILENT))


@pytest.mark.full
def test_ranks_on_cards_that_are_stuck_together(runner, monkeypatch):
    """What hangs in a recorded step is seen by nobody but the one who waits."""
    runner._first_answer_seconds = 0.5
    for worker in runner._workers:
        os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match=r"rank 0 has not answered for 0\.5 seconds"):
        runner.run(plan(PLAIN))


@pytest.mark.full
def test_an_exchange_that_somebody_misses_is_given_up(tmp_path):
    def meeting(rank):
        return Meeting(
            path=str(tmp_path / "ranks"),
            rank=rank,
            size=2,
            device="cpu",
            timeout=timedelta(seconds=2),
        )

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(meeting(1).join)
        ranks = meeting(0).join()
        other.result()
        with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
            ranks.sum(torch.ones(1))


def interrupting(function, times=1):
    """Returns `function` with Ctrl-C after its first call, the given number of times."""
    left = [times]

    def call(*args):
        value = function(*args)
        for _ in range(left.pop() if left else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return value

    return call


@pytest.mark.full
@pytest.mark.parametrize("where", ["sent", "answered"])
def test_an_interrupted_step_does_not_shift_the_next(lasting, monkeypatch, where):
    """Ctrl-C when only one rank has the plan, or only one has answered: the step ends first, and
    the ranks are in step in the next."""
    with monkeypatch.context() as patch:
        if where == "sent":
            send = lasting._workers[0].send_message
            patch.setattr(lasting._workers[0], "send_message", interrupting(send))
        else:
            receive = lasting._workers[0].receive
            patch.setattr(lasting._workers[0], "receive", interrupting(receive))
        with pytest.raises(KeyboardInterrupt):
            lasting.run(plan(ALL))
    assert lasting.run(plan(PLAIN)).sampled == {PLAIN: 2}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.full
def test_the_same_error_on_all_ranks(lasting):
    assert lasting.info == "cpu"
    result = lasting.run(plan(PLAIN, ALL, "plain too"))
    assert result.sampled == {PLAIN: 2, "plain too": 2}
    assert result.errors[ALL].message == "broken on all"
    assert lasting.run(plan(PLAIN)).sampled == {PLAIN: 2}


@pytest.mark.full
def test_different_results_end_the_ranks(runner):
    for what in (APART, PLAIN):
        with pytest.raises(WorkerDiedError, match="computed different results in one step"):
            runner.run(plan(what))


@pytest.mark.full
def test_two_interrupts_end_the_ranks(runner, monkeypatch):
    """A step that does not end does not keep the user either."""
    send = runner._workers[0].send_message
    monkeypatch.setattr(runner._workers[0], "send_message", interrupting(send, times=2))
    with pytest.raises(KeyboardInterrupt):
        runner.run(plan(ALL))
    with pytest.raises(WorkerDiedError, match="two interrupts"):
        runner.run(plan(PLAIN))
