"""The driver with a fake engine: order, bounds, refusals, and abandoned runs."""

import itertools
import threading
import time

import pytest

from mmdeploy_llm.desk import drive
from mmdeploy_llm.desk.drive import Driver
from mmdeploy_llm.desk.outcome import Job
from mmdeploy_llm.errors import EngineError, MediaError
from mmdeploy_llm.outputs import CompletionOutput, Completions, RequestMetrics, RequestOutput
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.request import Request


class FakeEngine:
    """Ends every request in the step after its arrival, the newest first; stuck prompts go on
    until they are aborted."""

    death = None

    def __init__(self):
        self.requests, self.aborted, self.most, self.stuck = {}, [], 0, set()

    def add(self, request):
        self.requests[request.request_id] = request
        self.most = max(self.most, len(self.requests))

    def abort(self, request_ids):
        self.aborted += request_ids

    def close(self):
        self.is_closed = True

    def step(self):
        ended = [
            request
            for request in reversed(self.requests.values())
            if request.prompt not in self.stuck or request.request_id in self.aborted
        ]
        for request in ended:
            del self.requests[request.request_id]
        return tuple(
            RequestOutput(
                request_id=request.request_id,
                prompt=request.prompt,
                outputs=Completions([CompletionOutput(index=request.index)]),
                finished=True,
                metrics=RequestMetrics(arrival_time=0.0),
            )
            for request in ended
        )


def request(name, index=0):
    return Request(
        request_id=f"{name}-{index}",
        prompt=name,
        prompt_token_ids=[1],
        params=SamplingParams(),
        index=index,
    )


def job(index, accept=None, num_outputs=1):
    accept = accept or (lambda: tuple(request(f"job{index}", n) for n in range(num_outputs)))
    return Job(index=index, prompt=f"job{index}", num_outputs=num_outputs, accept=accept)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def driver(engine):
    driver = Driver(engine, num_threads=2, num_ahead=4)
    yield driver
    driver.close()


def test_every_job_comes_back(driver):
    found = [item.job.index for item in driver.run(job(n) for n in range(50))]
    assert sorted(found) == list(range(50))


def test_no_more_than_num_ahead_are_taken(driver, engine):
    taken = itertools.count()
    results = driver.run(job(next(taken)) for _ in itertools.count())
    for _ in range(20):
        next(results)
    assert next(taken) <= 20 + 4
    assert engine.most <= 4
    results.close()


def test_a_refused_job_has_error_outputs_for_each_sample(driver):
    def refuse():
        raise MediaError("bad picture")

    items = list(driver.run([job(0), job(1, refuse, num_outputs=2), job(2)]))
    refused = [item for item in items if item.job.index == 1]
    assert [item.output.outputs.index for item in refused] == [0, 1]
    assert {item.output.error_code for item in refused} == {400}
    assert {item.output.error_msg for item in refused} == {"bad picture"}
    assert all(isinstance(item.error, MediaError) for item in refused)
    assert len(items) == 4


def test_a_bug_in_intake_is_that_jobs_error(driver):
    def broken():
        raise KeyError("oops")

    (item,) = driver.run([job(0, broken)])
    assert item.output.error_code == 500
    assert "KeyError" in item.output.error_msg


def test_a_slow_item_does_not_hold_up_those_behind_it(driver):
    gate = threading.Event()

    def slow():
        gate.wait(10)
        return (request("slow"),)

    results = driver.run([job(0, slow), job(1), job(2)])
    first = [next(results).job.index for _ in range(2)]
    gate.set()
    assert sorted(first) == [1, 2]
    assert [item.job.index for item in results] == [0]


def test_intake_runs_in_threads_side_by_side(driver):
    names, barrier = set(), threading.Barrier(2, timeout=10)

    def accept():
        names.add(threading.current_thread().name)
        barrier.wait()
        return (request(threading.current_thread().name),)

    assert all(item.output.is_ok for item in driver.run([job(0, accept), job(1, accept)]))
    assert len(names) == 2


def test_leaving_a_run_early_aborts_what_is_left(driver, engine):
    engine.stuck = {"job0", "job2"}
    results = driver.run(job(n) for n in range(4))
    assert sorted(next(results).job.index for _ in range(2)) == [1, 3]
    results.close()
    assert sorted(engine.aborted) == ["job0-0", "job2-0"]
    assert not engine.requests


def test_an_interrupt_that_takes_the_last_output_of_a_request(driver, engine):
    """It arrives when the engine has ended the request and no caller has received the output."""
    step = engine.step

    def interrupted():
        step()
        engine.step = step
        raise KeyboardInterrupt

    engine.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        list(driver.run([job(0)]))
    assert [item.job.index for item in driver.run([job(1), job(2)])] == [2, 1]


def test_a_closed_driver_refuses(driver):
    driver.close()
    with pytest.raises(EngineError, match="closed"):
        next(driver.run([job(0)]))


def test_close_in_another_thread_ends_a_run(driver, engine):
    """Whether the run waits for intake or for the engine."""
    engine.stuck.add("job0")
    for run in (driver.run([job(0)]), driver.run([job(1, lambda: time.sleep(0.5) or ())])):
        closing = threading.Timer(0.2, driver.close)
        closing.start()
        begin = time.monotonic()
        with pytest.raises(EngineError, match="closed while this call was running"):
            list(run)
        assert time.monotonic() - begin < 5
        closing.join(5)
    assert engine.is_closed
    with pytest.raises(EngineError, match="is closed; make a new one"):
        driver.run([])


def test_close_does_not_wait_for_ever_for_a_step(driver, engine, monkeypatch, caplog):
    """The engine is closed when the step ends."""
    begun, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(drive, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(engine, "step", lambda: begun.set() or (gate.wait(30) and ()))
    ends = []

    def run():
        with pytest.raises(EngineError, match="closed while"):
            list(driver.run([job(0)]))
        ends.append(engine.is_closed)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(30)
    engine.is_closed = False
    driver.close()
    assert "does not wait any longer" in caplog.text
    assert not engine.is_closed
    gate.set()
    thread.join(30)
    assert ends == [True]


def test_a_run_in_a_forked_process(driver, monkeypatch):
    """It raises in a new run and in an old one, and its end leaves the engine alone."""
    run = driver.run(job(n) for n in range(20))
    next(run)
    monkeypatch.setattr("os.getpid", lambda: 1)
    with pytest.raises(EngineError, match="forked from it"):
        driver.run([])
    with pytest.raises(EngineError, match="forked from it"):
        list(run)
    monkeypatch.undo()
    assert not driver._engine.aborted
