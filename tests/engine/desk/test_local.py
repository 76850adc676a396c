"""The local desk with a fake engine: order, bounds, refusals, aborts, deadlines, the end."""

import threading
import time

import pytest

from mmdeploy_llm.engine.desk import local
from mmdeploy_llm.engine.desk.desk import _uses
from mmdeploy_llm.engine.desk.local import LocalDesk
from mmdeploy_llm.errors import (
    EngineError,
    MediaError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    WorkerDiedError,
)


def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    assert condition()


def test_an_idle_desk_does_not_step(desk, engine, ask):
    assert desk.submit(ask("a")).get(60).outputs.text == "."
    before = engine.num_steps
    time.sleep(0.05)
    assert engine.num_steps == before


def test_a_prompt_that_nobody_reads_is_computed(desk, engine, ask):
    ticket = desk.submit(ask("a"))
    until(lambda: ticket.is_done)
    assert ticket.status == "finished"


def test_a_prompt_is_forgotten_before_its_reader_knows_of_its_end(desk, ask):
    """The reader may unload its adapter at once, which no prompt that is here may use."""
    seen = []

    def note(ticket):
        seen.append((ticket.is_done, len(desk._held)))

    ticket = desk.submit(ask("a"), note)
    assert ticket.get(60).is_ok
    until(lambda: seen)
    assert seen == [(True, 0)]


def test_a_refused_prompt_has_error_outputs_for_each_sample(desk, ask):
    def refuse():
        raise MediaError("bad picture")

    ticket = desk.submit(ask(refuse, n=2))
    output = ticket.get(60)
    assert [each.index for each in output.outputs] == [0, 1]
    assert (output.error_code, output.error_msg) == (400, "bad picture")
    assert isinstance(ticket.error, MediaError)
    assert ticket.status == "interrupted"
    assert ticket.get(60) is None
    assert desk.submit(ask("next")).get(60).is_ok


@pytest.mark.parametrize("error", [KeyError("oops"), SystemExit("oops")])
def test_a_bug_in_intake_is_that_prompts_error(desk, ask, error):
    def broken():
        raise error

    output = desk.submit(ask(broken)).get(60)
    assert output.error_code == 500
    assert type(error).__name__ in output.error_msg


def test_intake_overlaps_with_the_engine_and_with_itself(engine, intake, ask, open_desk):
    """Two prompts are prepared side by side; a slow one does not hold up those after it."""
    desk = open_desk(num_intake_threads=2)
    barrier, gate = threading.Barrier(2, timeout=10), threading.Event()
    both = [desk.submit(ask(barrier.wait)) for _ in range(2)]
    assert all(ticket.get(60).is_ok for ticket in both)
    slow = desk.submit(ask(lambda: gate.wait(120)))
    assert all(desk.submit(ask("a")).get(60).is_ok for _ in range(5))
    assert not slow.is_done
    gate.set()
    assert slow.get(60).is_ok


def test_no_more_than_num_ahead_are_begun(desk, engine, ask):
    engine.stuck.add("stuck")
    tickets = [desk.submit(ask("stuck")) for _ in range(50)]
    until(lambda: len(engine.requests) == desk.max_begun)
    time.sleep(0.02)
    assert engine.most == desk.max_begun == 4
    assert desk.stats().num_waiting == 46
    engine.stuck.clear()
    assert all(ticket.get(60).is_ok for ticket in tickets)
    assert engine.most == 4


def test_smaller_priorities_are_prepared_first(desk, engine, intake, ask):
    engine.stuck.add("stuck")
    held = [desk.submit(ask("stuck")) for _ in range(desk.max_begun)]
    until(lambda: len(engine.requests) == len(held))
    tickets = [desk.submit(ask("a", priority=priority)) for priority in (3, 1, 2, 1)]
    engine.stuck.clear()
    assert all(ticket.get(60).is_ok for ticket in tickets)
    assert intake.order == [0, 1, 2, 3, 5, 7, 6, 4]


class TestAbort:
    """An abort ends a prompt at the next step, wherever it is; so does dropping the ticket."""

    @pytest.fixture
    def submitted(self, desk, engine, ask):
        engine.stuck.add("stuck")

        def submit():
            ticket = desk.submit(ask("stuck"))
            until(lambda: engine.requests)
            return ticket

        return submit

    def test_in_the_engine(self, submitted, engine):
        inside = submitted()
        inside.abort()
        assert inside.get(60).error_code == 499
        assert inside.status == "interrupted"
        assert not engine.requests

    def test_dropped(self, submitted, engine, desk):
        submitted()
        until(lambda: not engine.requests)
        until(lambda: not desk._held)
        assert desk.stats().num_waiting == 0

    def test_in_intake_and_in_the_queue(self, desk, engine, ask):
        gate = threading.Event()
        slow = [desk.submit(ask(lambda: gate.wait(120))) for _ in range(6)]
        for ticket in slow:
            ticket.abort()
        outputs = [ticket.get(60) for ticket in slow]
        assert {output.error_code for output in outputs} == {499}
        assert {output.outputs.finish_reason for output in outputs} == {"abort"}
        gate.set()
        assert desk.submit(ask("a")).get(60).is_ok
        assert not engine.requests

    def test_one_that_has_ended(self, desk, engine, ask):
        ticket = desk.submit(ask("a"))
        assert ticket.get(60).is_ok
        ticket.abort()
        assert desk.submit(ask("b")).get(60).is_ok
        assert not engine.aborted


def test_deadlines_pass_in_the_queue_and_in_intake(desk, engine, ask, clock):
    gate, begun = threading.Event(), []
    stuck = lambda: begun.append(1) or gate.wait(120)  # noqa: E731
    blocked = [desk.submit(ask(stuck, timeout=300)) for _ in range(desk.max_begun)]
    until(lambda: begun)
    blocked.append(desk.submit(ask("a", timeout=0.01)))
    last = blocked[-1].get(60)
    clock.pass_by(300)
    desk.submit(ask("a", timeout=0.01))  # wakes the desk, which waits by another clock
    outputs = [*(ticket.get(60) for ticket in blocked[:-1]), last]
    assert {output.error_code for output in outputs} == {408}
    assert "it was being prepared" in outputs[0].error_msg
    assert "it waited to be prepared" in outputs[-1].error_msg
    assert all(isinstance(ticket.error, RequestTimeoutError) for ticket in blocked)
    gate.set()
    assert desk.submit(ask("a", timeout=10)).get(60).is_ok


def test_a_prompts_own_urgency(desk, engine, ask):
    gate = threading.Event()
    first = [desk.submit(ask(lambda: gate.wait(120))) for _ in range(desk.max_begun)]
    late = desk.submit(ask({"prompt": "a", "timeout": 0.05}))
    assert late.get(60).error_code == 408
    urgent = [desk.submit(ask({"prompt": "a", "priority": number})) for number in (2, 1)]
    gate.set()
    assert all(ticket.get(60).is_ok for ticket in first + urgent)
    with pytest.raises(RequestError, match="timeout must be"):
        desk.submit(ask("a", timeout=-1))
    with pytest.raises(RequestError, match="priority must be"):
        desk.submit(ask("a", priority="high"))


@pytest.mark.parametrize("wrong", [{"priority": "high"}, {"timeout": -1}])
def test_a_prompt_with_a_wrong_key_is_an_error_of_its_own(desk, ask, wrong):
    (name,) = wrong
    ticket = desk.submit(ask({"prompt": "a", **wrong}, n=2))
    output = ticket.get(60)
    assert (output.error_code, len(output.outputs)) == (400, 2)
    assert f"{name} must be" in output.error_msg
    assert desk.submit(ask("a")).get(60).is_ok


def test_priority_and_deadline_reach_the_engine(desk, engine, ask):
    engine.stuck.add("stuck")
    ticket = desk.submit(ask("stuck", priority=3, timeout=60))
    until(lambda: engine.requests)
    (request,) = engine.requests.values()
    assert (request.priority, request.deadline.seconds) == (3, 60)
    ticket.abort()


def test_too_many_raise_or_wait(desk, engine, ask):
    """max_queued counts those beyond max_num_seqs, which is 2 here."""
    engine.stuck.add("stuck")
    tickets = [desk.submit(ask("stuck"), max_queued=3, waits=False) for _ in range(5)]
    with pytest.raises(QueueFullError, match="5 requests are here already"):
        desk.submit(ask("a"), max_queued=3, waits=False)
    waiting = threading.Thread(target=lambda: tickets.append(desk.submit(ask("a"), max_queued=3)))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    tickets[0].abort()
    waiting.join(60)
    engine.stuck.clear()
    assert tickets[5].get(60).is_ok


def test_a_request_id_is_used_once_at_a_time(desk, engine, ask):
    engine.stuck.add("stuck")
    first = desk.submit(ask("stuck", request_id="a"))
    second = desk.submit(ask("stuck", request_id="a"))
    assert "'a' is in use" in second.get(60).error_msg
    assert not first.is_done
    first.abort()
    assert first.get(60).request_id == "a"
    assert desk.submit(ask("b", request_id="a")).get(60).request_id == "a"


def test_who_is_told_may_raise(desk, ask, caplog):
    def broken(ticket):
        raise RuntimeError("loop is closed")

    ticket = desk.submit(ask("a"), broken)
    assert ticket.get(60).is_ok
    assert desk.submit(ask("b")).get(60).is_ok
    assert "could not be told" in caplog.text


def test_a_dead_engine(desk, engine, ask):
    """Its prompts end with the reason, queued ones too, and later prompts are refused."""
    engine.stuck.add("stuck")
    tickets = [desk.submit(ask("stuck", n=n)) for n in (1, 2, 1, 1, 1, 1)]
    until(lambda: len(engine.requests) > 4)
    engine.death = WorkerDiedError("rank 1 died")
    assert all(ticket.get(60).error_msg == "rank 1 died" for ticket in tickets)
    with pytest.raises(WorkerDiedError, match="rank 1 died"):
        desk.submit(ask("a"))


def test_an_error_of_the_engine_itself(desk, engine, ask, monkeypatch):
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    output = desk.submit(ask("a")).get(60)
    assert output.error_code == 500
    assert "ZeroDivisionError" in output.error_msg
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        desk.submit(ask("a"))
    until(lambda: engine.is_closed)


class _OwnError(BaseException):
    pass


@pytest.mark.parametrize(
    "error", [_OwnError("oops"), KeyboardInterrupt(), GeneratorExit(), SystemExit(3)]
)
def test_whatever_ends_the_engines_thread_ends_every_caller(
    desk, engine, ask, monkeypatch, caplog, error
):
    """Those that wait, queued ones too, and later ones: nobody else would tell them."""

    def broken():
        raise error

    engine.stuck.add("stuck")
    tickets = [desk.submit(ask("stuck")) for _ in range(20)]
    until(lambda: engine.requests)
    monkeypatch.setattr(engine, "step", broken)
    reason = f"the engine failed: {type(error).__name__}"
    assert all(ticket.get(60).error_msg.startswith(reason) for ticket in tickets)
    with pytest.raises(EngineError, match=reason):
        desk.submit(ask("a"))
    until(lambda: engine.is_closed)
    assert "the engine cannot continue" in caplog.text


def test_an_engine_that_does_not_start():
    def start():
        raise MediaError("no model")

    with pytest.raises(MediaError, match="no model"):
        LocalDesk(start)


class TestClose:
    def test_it_ends_what_is_unfinished(self, desk, engine, intake, ask):
        engine.stuck.add("stuck")
        prompts = ("stuck", lambda: intake.is_interrupted.wait(120), "b")
        tickets = [desk.submit(ask(prompt)) for prompt in prompts]
        until(lambda: engine.requests)
        closers = [threading.Thread(target=desk.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(60)
        assert all("closed while" in ticket.get(60).error_msg for ticket in tickets[:2])
        assert engine.is_closed
        assert not desk.thread.is_alive()
        with pytest.raises(EngineError, match="is closed; make a new one"):
            desk.submit(ask("a"))

    def test_it_does_not_wait_for_ever_for_a_step(self, desk, engine, ask, monkeypatch, caplog):
        """The engine is closed when the step ends."""
        begun, gate = threading.Event(), threading.Event()
        monkeypatch.setattr(local, "CLOSE_SECONDS", 0.1)
        monkeypatch.setattr(engine, "step", lambda: begun.set() or (gate.wait(120) and ()))
        ticket = desk.submit(ask("a"))
        begun.wait(60)
        desk.close()
        assert "does not wait any longer" in caplog.text
        assert not engine.is_closed
        gate.set()
        assert "closed while" in ticket.get(60).error_msg
        desk.thread.join(60)
        assert engine.is_closed

    def test_one_who_waits_for_room_is_told(self, desk, engine, ask):
        engine.stuck.add("stuck")
        tickets = [desk.submit(ask("stuck")) for _ in range(2)]
        ends = []

        def wait():
            with pytest.raises(EngineError, match="closed"):
                desk.submit(ask("a"), max_queued=0)
            ends.append(True)

        waiting = threading.Thread(target=wait)
        waiting.start()
        waiting.join(0.1)
        desk.close()
        waiting.join(60)
        assert ends == [True]
        assert len(tickets) == 2

    def test_from_the_desks_own_thread(self, desk, engine, ask):
        ticket = desk.submit(ask("a"), lambda _: desk.close())
        assert ticket.get(60).is_ok
        desk.thread.join(60)
        assert engine.is_closed


def test_a_forked_process_is_refused_and_harms_nothing(desk, engine, ask, monkeypatch):
    engine.stuck.add("stuck")
    ticket = desk.submit(ask("stuck"))
    until(lambda: engine.requests)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        for call in (lambda: desk.submit(ask("a")), lambda: desk.count_tokens("a"), desk.close):
            with pytest.raises(EngineError, match="forked from it"):
                call()
        ticket.abort()
    assert desk.stats().num_running == 1
    assert not engine.aborted


@pytest.mark.parametrize(
    ("prompt", "adapter", "usual", "expected"),
    [
        ({"prompt": "a", "adapter": "one"}, "", "", True),
        ({"prompt": "a", "adapter": "two"}, "one", "", False),
        ({"prompt": "a", "adapter": 3}, "", "", False),  # no matter to who unloads an adapter
        ("a", "one", "", True),
        ("a", "", "one", True),
        ("a", "", "", False),
    ],
)
def test_which_prompts_use_an_adapter(ask, prompt, adapter, usual, expected):
    assert _uses(ask(prompt, adapter=adapter), "one", usual) is expected
