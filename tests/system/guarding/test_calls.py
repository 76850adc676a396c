"""CallGuard: answers, errors, time limits, abandoned calls."""

import gc
import threading
import time
import weakref

import pytest

from mmdeploy_llm.errors import MediaError, MediaTimeoutError
from mmdeploy_llm.system.guarding import calls as guard
from mmdeploy_llm.system.guarding.calls import CallGuard
from mmdeploy_llm.values.deadline import Deadline


@pytest.fixture(autouse=True)
def no_grace(monkeypatch):
    monkeypatch.setattr(guard, "GRACE", 0.0)
    monkeypatch.setattr(guard, "POLL_INTERVAL", 0.05)


@pytest.fixture
def awake():
    """An event that calls wait for; set at the end."""
    event = threading.Event()
    yield event
    event.set()


def run(calls, call, seconds=5.0, owner="plugin 'x'", deadline=None):
    return calls.run(
        call,
        seconds=seconds,
        owner=owner,
        timeout_message=f"{owner} is late",
        deadline=deadline,
    )


def hang(calls, awake, count=1):
    """The helper threads of calls that hang until `awake` is set."""
    helpers = []

    def wait():
        helpers.append(threading.current_thread())
        awake.wait(120)

    for _ in range(count):
        with pytest.raises(MediaTimeoutError, match="plugin 'x' is late"):
            run(calls, wait, seconds=0.05)
    return helpers


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_what_a_call_returns_and_raises():
    def refuse():
        raise KeyError("no")

    calls = CallGuard()
    assert run(calls, lambda: 5) == 5
    assert run(calls, lambda: None) is None
    with pytest.raises(KeyError, match="no"):
        run(calls, refuse)
    with pytest.raises(SystemExit):
        run(calls, lambda: exec("raise SystemExit(3)"))
    assert run(calls, lambda: 6) == 6


def test_one_helper_serves_call_after_call():
    calls = CallGuard()
    first = run(calls, threading.get_ident)
    assert {run(calls, threading.get_ident) for _ in range(50)} == {first}
    assert first != threading.get_ident()


def test_a_call_that_hangs_is_abandoned_and_counted(awake):
    calls = CallGuard()
    start = time.monotonic()
    hang(calls, awake)
    assert time.monotonic() - start < 60
    assert calls.num_hung == 1
    assert run(calls, lambda: 7) == 7
    awake.set()
    wait_until(lambda: calls.num_hung == 0)


def test_plugins_that_keep_hanging_are_not_called_until_a_call_ends(awake):
    calls, called = CallGuard(max_hung=2), []
    hang(calls, awake, count=2)
    with pytest.raises(MediaError, match="plugin 'x' is not called: 2 earlier calls of it hang"):
        run(calls, lambda: called.append(1))
    assert not called
    assert run(calls, lambda: 8, owner="plugin 'y'") == 8
    awake.set()
    wait_until(lambda: calls.num_hung == 0)
    assert run(calls, lambda: 9) == 9


@pytest.mark.full
def test_a_deadline_ends_the_wait_and_is_no_fault_of_the_plugin(awake):
    """Beyond `max_hung` such calls the next one waits for its full time."""
    calls = CallGuard(max_hung=2)
    for num_late in (1, 2):
        with pytest.raises(MediaTimeoutError):
            run(calls, lambda: awake.wait(120), deadline=Deadline.after(0.05))
        assert calls.num_hung == num_late
    assert run(calls, lambda: 7) == 7, "it is still called"
    start = time.monotonic()
    with pytest.raises(MediaTimeoutError):
        run(calls, lambda: awake.wait(120), seconds=0.4, deadline=Deadline.after(0.05))
    assert time.monotonic() - start >= 0.4
    awake.set()
    wait_until(lambda: calls.num_hung == 0)


def test_a_deadline_after_the_time_limit_changes_nothing(awake):
    calls = CallGuard(max_hung=1)
    with pytest.raises(MediaTimeoutError, match="is late"):
        run(calls, lambda: awake.wait(120), seconds=0.05, deadline=Deadline.after(9))
    with pytest.raises(MediaError, match="is not called"):
        run(calls, lambda: 1, deadline=Deadline.after(9))


def test_helpers_of_abandoned_calls_end_with_their_call(awake):
    helpers = hang(CallGuard(), awake, count=3)
    wait_until(lambda: len(set(helpers)) == 3)
    assert all(helper.is_alive() and helper.daemon for helper in helpers)
    awake.set()
    wait_until(lambda: not any(helper.is_alive() for helper in helpers))


def test_closing_ends_helpers_and_waiting(awake):
    calls, errors = CallGuard(), []

    def wait():
        try:
            run(calls, lambda: awake.wait(120), seconds=20)
        except MediaError as error:
            errors.append(str(error))

    idle = run(calls, threading.current_thread)
    waiting = threading.Thread(target=wait)
    waiting.start()
    calls.close()
    waiting.join(timeout=60)
    assert errors
    with pytest.raises(MediaError, match="closed"):
        run(calls, lambda: 1)
    awake.set()
    wait_until(lambda: not idle.is_alive())


def test_helpers_end_with_a_guard_that_nobody_closed():
    calls = CallGuard()
    helper = run(calls, threading.current_thread)
    assert helper.is_alive()
    del calls
    gc.collect()
    wait_until(lambda: not helper.is_alive())


def test_an_idle_helper_holds_nothing_of_its_last_call():
    class Media:
        pass

    calls, media = CallGuard(), Media()
    held = weakref.ref(media)
    made = run(calls, lambda media=media: [media])
    assert made[0] is media
    del media, made
    wait_until(lambda: held() is None)


def test_callers_do_not_wait_for_each_other(awake):
    calls, done = CallGuard(), []
    slow = threading.Thread(target=lambda: done.append(run(calls, lambda: awake.wait(120), 20)))
    slow.start()
    assert run(calls, lambda: 1) == 1
    assert not done
    awake.set()
    slow.join(timeout=60)
    assert done == [True]
