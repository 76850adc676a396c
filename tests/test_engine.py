"""The five calls of a step, with a fake runner: a failure in a step ends its requests, not the
engine."""

from dataclasses import replace

import pytest

from mmdeploy_llm.engine.delivery.delivery import Delivery
from mmdeploy_llm.engine.engine import Engine
from mmdeploy_llm.engine.runner.executor import deferred
from mmdeploy_llm.engine.schedule.scheduler import Scheduler, SchedulerConfig
from mmdeploy_llm.hooks import EngineInfo, PluginManager, hookimpl
from mmdeploy_llm.request import Request
from mmdeploy_llm.testing.tiny import make_tokenizer
from mmdeploy_llm.values.outputs.metrics import EngineStats
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import RequestFailure, StepResult

INFO = EngineInfo(
    model="fake",
    architecture="Fake",
    device="cpu",
    dtype="float32",
    num_blocks=16,
    block_size=4,
    max_num_seqs=4,
    max_model_len=64,
)


class FakeRunner:
    """Samples token 40 for everybody; `raises` in chosen steps, `errors` for chosen requests."""

    def __init__(self):
        self.num_steps, self.raises, self.errors = 0, set(), {}

    can_overlap = False

    def start(self, plan, before=None):
        assert before is None
        return deferred(plan, self.compute)

    def compute(self, plan):
        self.num_steps += 1
        if self.num_steps in self.raises:
            raise RuntimeError("the device is gone")
        ids = [item.request_id for item in plan.scheduled if item.samples]
        errors = {one: self.errors[one] for one in ids if one in self.errors}
        sampled = {one: 40 for one in ids if one not in errors}
        return StepResult(step_id=plan.step_id, sampled=sampled, errors=errors)

    def close(self):
        self.is_closed = True


class Observer:
    def __init__(self):
        self.started, self.stopped, self.steps, self.records = [], [], [], []

    @hookimpl
    def on_engine_start(self, info):
        self.started.append(info)

    @hookimpl
    def on_engine_stop(self, info):
        self.stopped.append(info)

    @hookimpl
    def on_step(self, stats):
        self.steps.append(stats)

    @hookimpl
    def on_request_finished(self, record):
        self.records.append(record)


@pytest.fixture
def observer():
    return Observer()


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def engine(observer, runner):
    plugins = PluginManager.load(plugins=())
    plugins.register(observer, name="observer")
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, num_blocks=16, block_size=4
    )
    return Engine(
        scheduler=Scheduler(config),
        runner=runner,
        delivery=Delivery(make_tokenizer()),
        plugins=plugins,
        info=INFO,
    )


def request(request_id, max_tokens=3, num_prompt=5):
    return Request(
        request_id=request_id,
        prompt=request_id,
        prompt_token_ids=list(range(50, 50 + num_prompt)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0),
        arrival_time=1.0,
        preprocess_end_time=1.5,
    )


def run(engine):
    outputs = []
    for _ in range(100):
        if not engine.has_work:
            return {output.request_id: output for output in outputs}
        outputs.extend(engine.step())
    raise AssertionError("the engine does not come to an end")


def test_requests_run_to_their_end(engine, observer):
    for name in ("a", "b"):
        engine.add(request(name))
    outputs = run(engine)
    assert all(output.outputs.token_ids == [40] * 3 for output in outputs.values())
    assert not engine._requests
    assert {record.request_id for record in observer.records} == {"a", "b"}
    assert all(record.num_output_tokens == 3 for record in observer.records)
    assert sum(stats.num_sampled_tokens for stats in observer.steps) == 6
    assert observer.started == [INFO]


def test_a_step_that_raises_ends_its_requests_only(engine, runner):
    runner.raises = {2}
    engine.add(request("a"))
    engine.step()
    engine.add(request("late"))
    outputs = run(engine)
    assert outputs["a"].outputs.finish_reason == "error"
    assert "the device is gone" in outputs["a"].error_msg
    assert outputs["a"].error_code == 500
    engine.add(request("next"))
    assert run(engine)["next"].is_ok


def test_an_error_of_one_request_harms_no_other(engine, runner):
    runner.errors = {"b": RequestFailure(code=500, message="its own fault")}
    for name in "abc":
        engine.add(request(name))
    outputs = run(engine)
    assert outputs["b"].error_msg == "its own fault"
    assert outputs["a"].is_ok
    assert outputs["c"].is_ok


def test_abort_delivers_a_last_output(engine, observer):
    engine.add(request("a", max_tokens=50))
    engine.add(request("b"))
    engine.step()
    engine.step()
    engine.abort(["a", "unknown"])
    outputs = run(engine)
    assert outputs["a"].outputs.finish_reason == "abort"
    assert outputs["a"].error_code == 499
    assert len(outputs["a"].outputs.token_ids) == 2
    assert outputs["b"].is_ok
    assert {record.finish_reason for record in observer.records} == {"abort", "length"}


def test_a_request_that_can_never_fit_is_refused_with_numbers(engine):
    engine.add(request("long", num_prompt=70))
    assert "max_model_len = 64" in run(engine)["long"].error_msg


def test_close_is_told_once(engine, observer):
    engine.close()
    engine.close()
    assert observer.stopped == [INFO]


def test_counters_are_plain_values(engine):
    """A prompt of 9 tokens has two full blocks of 4, which the next one finds."""
    empty = EngineStats(
        num_running=0,
        num_waiting=0,
        num_free_blocks=16,
        num_blocks=16,
        num_queried_tokens=0,
        num_cached_tokens=0,
        num_generated_tokens=0,
        num_preemptions=0,
    )
    assert engine.stats() == empty
    engine.add(request("first", num_prompt=9))
    assert engine.stats() == replace(empty, num_waiting=1)
    engine.step()
    after_one = {"num_queried_tokens": 9, "num_generated_tokens": 1}
    assert engine.stats() == replace(empty, num_running=1, num_free_blocks=13, **after_one)
    run(engine)
    engine.add(request("second", num_prompt=9))
    run(engine)
    assert engine.stats() == replace(
        empty, num_queried_tokens=18, num_cached_tokens=8, num_generated_tokens=6
    )
