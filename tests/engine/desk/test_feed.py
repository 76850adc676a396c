"""A feed: bounded look-ahead over any iterable, the end of the caller, of the desk, of the
engine."""

import gc
import itertools
import threading
import time

import pytest

from mmdeploy_llm import LLM
from mmdeploy_llm.engine.desk import local
from mmdeploy_llm.engine.desk.feed import Feed
from mmdeploy_llm.errors import EngineError, MediaError, WorkerDiedError
from mmdeploy_llm.values.params import SamplingParams


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


@pytest.fixture
def feed(desk, ask):
    def feed(prompts, **fields):
        return Feed(desk, (ask(prompt, **fields) for prompt in prompts)).answers()

    return feed


@pytest.fixture
def llm(desk):
    """An LLM with the fake engine."""
    llm = object.__new__(LLM)
    llm._desk = desk
    return llm


def test_every_prompt_comes_back(feed):
    found = list(feed(map(str, range(50))))
    assert sorted(int(answer.ask.prompt) for answer in found) == list(range(50))
    assert all(answer.output.item == answer.ask.prompt for answer in found)


def test_prompts_are_taken_as_there_is_room(feed, desk, engine):
    taken = itertools.count()
    answers = feed(str(next(taken)) for _ in itertools.count())
    for _ in range(20):
        next(answers)
    assert next(taken) <= 20 + desk.max_begun
    assert engine.most <= desk.max_begun
    answers.close()


def test_answers_that_nobody_reads_take_no_more_prompts(feed, desk):
    taken = itertools.count()
    answers = feed(str(next(taken)) for _ in itertools.count())
    next(answers)
    time.sleep(0.1)
    assert next(taken) <= 1 + desk.max_begun
    answers.close()


def test_a_refused_prompt(feed):
    def refuse():
        raise MediaError("bad picture")

    found = {answer.ask.prompt: answer for answer in feed(["a", refuse, "b"], n=2)}
    assert len(found) == 3
    assert found[refuse].output.error_code == 400
    assert isinstance(found[refuse].exception, MediaError)


@pytest.mark.parametrize("leave", ["close", "drop", "drop before the start"])
def test_leaving_early_aborts_what_is_left(desk, engine, ask, leave):
    engine.stuck = {"0", "2"}
    feed = Feed(desk, [ask(str(n)) for n in range(4)])
    feed.fill()
    answers = feed.answers()
    if leave != "drop before the start":
        assert sorted(next(answers).ask.prompt for _ in range(2)) == ["1", "3"]
    until(lambda: len(engine.requests) == len(desk._held) == 2)  # the others have ended
    if leave == "close":
        answers.close()
    else:
        del answers, feed
        gc.collect()
    until(lambda: not engine.requests)
    assert len(set(engine.aborted)) == 2


def test_an_interrupt_is_the_callers(feed, desk, engine, ask):
    """Others of the same desk go on."""
    engine.stuck.add("stuck")
    other = desk.submit(ask("stuck"))

    def prompts():
        yield "stuck"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(feed(prompts()))
    until(lambda: len(engine.requests) == 1)
    assert not other.is_done
    engine.stuck.clear()
    assert other.get(60).is_ok
    assert [answer.output.is_ok for answer in feed(["a", "b"])] == [True, True]


@pytest.mark.parametrize("waiting_for", ["engine", "intake"])
def test_close_in_another_thread(feed, desk, engine, intake, waiting_for, monkeypatch):
    monkeypatch.setattr(local, "CLOSE_SECONDS", 600.0)  # for what does not end by itself
    prompts = {"engine": ["stuck"], "intake": [lambda: intake.is_interrupted.wait(120)]}
    engine.stuck.add("stuck")
    answers = feed(prompts[waiting_for])
    closing = threading.Timer(0.1, desk.close)
    closing.start()
    begin = time.monotonic()
    with pytest.raises(EngineError, match="closed while this call was running"):
        list(answers)
    assert time.monotonic() - begin < 60
    closing.join(60)
    with pytest.raises(EngineError, match="is closed; make a new one"):
        feed([])


def test_a_feed_in_a_forked_process(feed, engine, monkeypatch):
    """It raises in a new one and in an old one, and its end leaves the engine alone."""
    answers = feed(map(str, range(20)))
    next(answers)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        with pytest.raises(EngineError, match="forked from it"):
            feed([])
        with pytest.raises(EngineError, match="forked from it"):
            list(answers)
    assert not engine.aborted


class TestDeath:
    """An engine that dies: what it held ends in error, what had finished is kept."""

    def prompts_of(self, engine):
        return {request.prompt for request in list(engine.requests.values())}

    @pytest.fixture
    def dying(self, engine):
        engine.stuck.update("bc")

        def die():
            until(lambda: self.prompts_of(engine) >= {"b"} and "a" not in self.prompts_of(engine))
            engine.death = WorkerDiedError("rank 1 died")

        thread = threading.Thread(target=die)
        thread.start()
        yield
        thread.join()

    def test_an_iterable(self, feed, dying):
        answers = feed(itertools.chain("ab", itertools.repeat("c")))
        found = []
        with pytest.raises(WorkerDiedError, match="rank 1 died"):
            found.extend(answer.output.error_msg for answer in answers)
        assert found[0] is None
        assert set(found[1:]) == {"rank 1 died"}
        assert len(found) <= 5  # those that the desk had taken by then

    def test_a_list(self, llm, dying):
        prompts = ["a", *"bc" * 5]
        found = llm.generate(prompts, SamplingParams(n=2), use_tqdm=False)
        assert [output.error_code for output in found] == [200] + [500] * 10
        assert [len(output.outputs) for output in found] == [2] * 11
        assert {output.error_msg for output in found[1:]} == {"rank 1 died"}
        assert [output.item for output in found] == prompts
        assert found[10].prompt == "c"
        with pytest.raises(WorkerDiedError):
            llm.generate("a", use_tqdm=False)

    def test_a_list_that_raises(self, llm, dying):
        with pytest.raises(WorkerDiedError):
            llm.generate(["a", "b", "c"], use_tqdm=False, on_error="raise")
