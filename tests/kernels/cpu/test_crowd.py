"""Where other threads want the CPUs, those of OpenMP do not spin."""

import os
import sys
import threading
import time

import pytest

from mmdeploy_llm.kernels.cpu import crowd as module
from mmdeploy_llm.kernels.cpu.crowd import Crowd, add_idle_threads, thread_times, watch_crowd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


CALM, CROWDED = (1, 0.05), (1, 0.5)


def seen(*looks):
    """Whether there is a crowd after each of the looks, at seconds that threads ran and waited
    since the one before."""
    crowd, ran, waited, found = Crowd((7.0, 9.0)), 7.0, 9.0, []
    for more_ran, more_waited in looks:
        ran, waited = ran + more_ran, waited + more_waited
        crowd.see((ran, waited))
        found.append(crowd.is_there)
    return found


def test_a_crowd_is_one_for_which_threads_wait():
    assert seen(CALM, CALM) == [False, False]
    assert seen(CALM, CROWDED) == [False, True]
    assert seen((0.01, 0.5)) == [False]  # an engine that has nothing to do
    assert seen((5, 0), (-3, -4), (1, 0)) == [False] * 3  # threads that have ended count no more


def test_threads_that_sleep_wait_too_and_say_nothing():
    """They are woken late, on an idle machine too: what is seen while they sleep keeps nobody."""
    assert seen(*[CROWDED] * 11) == [True] * 10 + [False]
    assert seen(CROWDED, *[CALM] * 10) == [True] * 10 + [False]
    assert seen(CROWDED, *[(0.01, 0)] * 20)[-1]  # nor does a pause end it


def test_a_crowd_that_stays_is_looked_for_less_and_less():
    found = "".join("+-"[not one] for one in seen(*[CROWDED] * 1000))
    assert [len(one) for one in found.split("-")][:7] == [10, 20, 40, 80, 120, 120, 120]
    another = seen(*[CROWDED] * 11, *[CALM] * 5, *[CROWDED] * 11)
    assert another == [True] * 10 + [False] * 6 + [True] * 10 + [False]


def test_threads_are_counted_that_ran():
    ran, waited = thread_times()
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    more, longer = thread_times()
    assert more > ran
    assert longer >= waited


@pytest.fixture
def runtime():
    found = module._runtime()
    if found is None:
        pytest.skip("torch's OpenMP is not GNU's")
    return found


def num_threads():
    return len(os.listdir("/proc/self/task"))


def waits_for(is_so):
    return any(is_so() or time.sleep(0.01) for _ in range(6000))


def test_idle_threads_end_with_the_one_that_made_them(runtime):
    before, made, stop = num_threads(), [], threading.Event()

    def work():
        add_idle_threads(runtime)
        made.append(num_threads())
        stop.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert waits_for(lambda: made)
    assert made[0] >= before + len(os.sched_getaffinity(0))
    stop.set()
    thread.join()
    assert waits_for(lambda: num_threads() <= before)


def test_the_watch_acts_and_ends(runtime, monkeypatch, caplog):
    caplog.set_level("INFO")
    times, calls, looks = [(0.0, 0.0)], [], []

    def look():
        looks.append(times[0])
        return times[0]

    monkeypatch.setattr(module, "INTERVAL", 0.01)
    monkeypatch.setattr(module, "thread_times", look)
    monkeypatch.setattr(module, "add_idle_threads", lambda _: calls.append("sleep"))
    monkeypatch.setattr(module, "end_pool", lambda: calls.append("spin"))
    assert watch_crowd()() is None  # the system does not tell
    times[0] = (1.0, 1.0)  # until now: it says nothing
    end = watch_crowd()
    assert waits_for(lambda: len(looks) > 2)
    times[0] = (2.0, 2.0)
    assert waits_for(lambda: calls == ["sleep"])

    def is_calm():
        times[0] = (times[0][0] + 1, 2.0)
        return calls == ["sleep", "spin"]

    assert waits_for(is_calm)
    end()
    assert "crowd" not in {thread.name for thread in threading.enumerate()}
    assert "without spinning" in caplog.text
