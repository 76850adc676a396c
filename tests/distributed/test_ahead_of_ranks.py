"""Two ranks whose steps start before the previous ones have finished give the outputs of one
process that runs one step after the other. Processes, exchanges and runners are real; the sampler
and the engine around them are those of engine/runner/test_overlap.py."""

import importlib.util
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.engine.runner import distributed
from mmdeploy_llm.engine.runner.distributed import DistributedRunner
from mmdeploy_llm.engine.runner.sampling.sampler import Sampler
from mmdeploy_llm.errors import WorkerDiedError
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.values.options.config import EngineConfig

pytestmark = pytest.mark.full

NAME = "test_ahead_of_ranks"


def load(name):
    """A module of another folder of tests, in this process or in that of a rank."""
    path = Path(__file__).parent.parent / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Parts:
    """A rank's part of a model: a half of the sum of hidden states, a half of the vocabulary."""

    def __init__(self, whole, ranks):
        self.whole, self.ranks = whole, ranks
        self.num_layers, self.num_kv_heads, self.head_dim = 1, 1, whole.head_dim
        self.hidden_size, self.positions = whole.hidden_size, whole.positions

    def forward(self, inputs):
        return self.ranks.sum(self.whole.forward(inputs) / self.ranks.size)

    def logits(self, hidden):
        own = self.whole.head.chunk(self.ranks.size, 1)[self.ranks.rank]
        return self.ranks.gather(hidden @ own)


class FailingRecorder:
    """Records nothing on one rank, after as many exchanges as the others."""

    def __init__(self, recorder, fails):
        self.recorder, self.fails = recorder, fails

    def record(self, compute):
        found = self.recorder.record(compute)
        if self.fails:
            raise torch.OutOfMemoryError("no memory to record")
        return found

    def recover(self):
        self.recorder.recover()


def build(config, ranks, peers, *, num_blocks=64, most=None, fails=(), graphs_fail=None):
    """fails: (launch, rank or None for all) that raises. most: tokens of a pass that find memory.
    graphs_fail: rank that cannot record."""
    torch.set_num_threads(1)
    ahead, graphs = load("engine/runner/test_overlap.py"), load("engine/runner/test_graphs.py")
    for launch, rank in fails:
        if rank in (None, ranks.rank):
            ahead.LaunchingSampler.fails_at = launch
    whole = ahead.Model()
    whole.most = most
    runner = ahead.new_runner(
        graphs, ahead.LaunchingSampler, Parts(whole, ranks), num_blocks, peers=peers
    )
    if most is None:
        recorder = FailingRecorder(graphs.Recorder(), graphs_fail == ranks.rank)
        runner.record_graphs([1, 2, 4, ahead.SEQS], recorder)
    return SimpleNamespace(runner=runner, info=runner._forward.graph_sizes)


@pytest.fixture(scope="module")
def ahead(load_file):
    return load_file("engine/runner/test_overlap.py")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def make(ahead, tokenizer):
    """An engine of two ranks. num_blocks: few of them make it preempt."""
    made = []

    def new(**options):
        configs = [EngineConfig(model="m", device="cpu")] * 2
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(os.path.dirname(__file__))
            module = __import__(NAME)
            made.append(DistributedRunner(configs, partial(module.build, **options)))
        return ahead.new_engine(made[-1], tokenizer, options.get("num_blocks", 64))

    yield new
    for runner in made:
        pids = [worker.pid for worker in runner._workers]
        runner.close()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.fixture(scope="module")
def two(make):
    """One engine for all tests that leave it as it was."""
    return make()


@pytest.fixture(scope="module")
def expected(ahead, tokenizer, load_file):
    """Returns the tokens of one process without steps ahead."""
    graphs = load_file("engine/runner/test_graphs.py")

    def outputs(given, *, num_blocks=64, seed=0):
        runner = ahead.new_runner(graphs, Sampler, ahead.Model(), num_blocks)
        return ahead.outputs_of(ahead.new_engine(runner, tokenizer, num_blocks), given, seed=seed)

    return outputs


def test_the_same_outputs_with_preemptions_and_ends_in_between(make, ahead, expected):
    engine = make(num_blocks=10)
    assert engine._runner.info == (1, 2, 4, ahead.SEQS)
    counting = ahead.Counting(engine)
    for seed in (0, 1):
        found = ahead.outputs_of(engine, ahead.requests(seed), seed=seed)
        assert found == expected(ahead.requests(seed), num_blocks=10, seed=seed)
        assert {reason for _, _, reason, _ in found.values()} >= {"stop", "length"}
    assert counting.num_ahead > 20
    assert engine._scheduler.stats().num_preemptions > 0


def test_a_step_is_with_the_ranks_before_the_one_in_front_is_done(two, ahead, monkeypatch):
    """Checked by the order of messages: the next step is sent before the result of the previous one
    is requested."""
    order, exchanged = [], two._runner._exchange

    def noted(value):
        plan = getattr(value, "plan", value)
        order.append((getattr(value, "mode", "finish"), plan.step_id))
        return exchanged(value)

    monkeypatch.setattr(two._runner, "_exchange", noted)
    ahead.outputs_of(two, ahead.requests(0, 2))
    follows = [place for place, (how, _) in enumerate(order) if how == "follow"]
    assert len(follows) > 5
    for place in follows:
        step = order[place][1]
        assert order[place + 1] == ("finish", step - 1)
        assert ("finish", step - 1) not in order[:place]


def test_requests_that_are_aborted_in_between(two, ahead, expected):
    wanted = expected(ahead.requests(5))
    found = ahead.outputs_of(two, ahead.requests(5), aborts=range(5, 60, 4))
    ended = {name for name, output in found.items() if output[2] == "abort"}
    assert ended
    assert {name: found[name] for name in set(found) - ended} == {
        name: wanted[name] for name in set(wanted) - ended
    }


def test_a_launch_that_fails_on_all_ranks_is_computed_when_its_turn_comes(make, ahead, expected):
    engine = make(fails=[(5, None)])
    assert ahead.outputs_of(engine, ahead.requests(2)) == expected(ahead.requests(2))


def test_all_ranks_without_memory_go_on_in_smaller_passes(make, ahead, expected):
    engine = make(most=4)
    assert ahead.outputs_of(engine, ahead.requests(3)) == expected(ahead.requests(3))


def test_a_launch_that_fails_on_one_rank_ends_the_run(make, ahead, monkeypatch):
    """It fails in the sampler, after all exchanges, so the other ranks have what they need and
    continue."""
    monkeypatch.setattr(distributed, "FAULT_SECONDS", 1.0)
    engine = make(fails=[(5, 1)])
    found = ahead.outputs_of(engine, ahead.requests(2))
    assert "on rank 1 and not on all ranks" in str(engine.death)
    assert {name for name, output in found.items() if output[2] == "error"}
    assert all("no launch" in output[3] for output in found.values() if output[2] == "error")


def with_a_step_in_flight(engine, ahead, count=4):
    for request in ahead.requests(8, count):
        engine.add(request)
    while engine._started is None:
        engine.step()
    return engine


def test_a_rank_that_dies_with_a_step_in_flight(make, ahead):
    engine = with_a_step_in_flight(make(), ahead)
    os.kill(engine._runner._workers[1].pid, signal.SIGKILL)
    outputs = []
    begin = time.monotonic()
    while engine.has_work:
        outputs += engine.step()
    assert time.monotonic() - begin < 60
    failed = [output for output in outputs if output.error_code == 500]
    assert failed
    assert all("died with signal SIGKILL" in output.error_msg for output in failed)
    assert isinstance(engine.death, WorkerDiedError)


def test_closing_with_a_step_in_flight(make, ahead):
    engine = with_a_step_in_flight(make(), ahead)
    workers = engine._runner._workers
    engine.close()
    assert all(worker._process.returncode == 0 for worker in workers), "none had to be killed"


def test_recordings_that_fail_on_one_rank_are_used_on_none(make, ahead, expected):
    engine = make(graphs_fail=1)
    assert engine._runner.info == ()
    assert ahead.outputs_of(engine, ahead.requests(4)) == expected(ahead.requests(4))


def abandon(engine):
    """Does as the driver does with what an interrupted call has left."""
    engine.abort(list(engine._requests))
    for _ in range(3):
        engine.step()
    assert not engine.has_work
    engine._requests.clear()


@pytest.mark.parametrize("what", ["start", "follow", "finish"])
def test_ctrl_c_with_steps_in_flight(two, ahead, expected, what, monkeypatch):
    """It comes when one rank of two has the message: the message goes out, and later requests are
    answered as ever."""
    exchanged, first = two._runner._exchange, two._runner._workers[0]
    send = first.send_message

    def sent_and_interrupted(message):
        send(message)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(value):
        is_it = what == getattr(value, "mode", "finish")
        monkeypatch.setattr(first, "send_message", sent_and_interrupted if is_it else send)
        return exchanged(value)

    with monkeypatch.context() as patch:
        patch.setattr(two._runner, "_exchange", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ahead.outputs_of(two, ahead.requests(6))
    monkeypatch.setattr(first, "send_message", send)
    abandon(two)
    assert ahead.outputs_of(two, ahead.requests(7), seed=7) == expected(ahead.requests(7), seed=7)


def test_ctrl_c_at_any_time(two, ahead, expected):
    """Signals from a thread, at moments of their own."""
    wanted = expected(ahead.requests(9, 6), seed=9)
    num_interrupted = 0
    for attempt in range(10):
        main = threading.main_thread().ident
        timer = threading.Timer(0.01 + 0.013 * attempt, signal.pthread_kill, (main, signal.SIGINT))
        try:
            timer.start()
            ahead.outputs_of(two, ahead.requests(10 + attempt))
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            num_interrupted += 1
            abandon(two)
        assert two.death is None
        assert ahead.outputs_of(two, ahead.requests(9, 6), seed=9) == wanted
    assert num_interrupted > 5
