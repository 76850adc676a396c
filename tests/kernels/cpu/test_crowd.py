"""Where other threads want the CPUs, those of OpenMP do not spin."""

import os
import sys
import threading
import time

import pytest

from mmdeploy_llm.kernels.cpu import crowd as module
from mmdeploy_llm.kernels.cpu.crowd import Crowd, add_idle_threads, thread_times, watch_crowd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def seen(*looks):
    """What a crowd is after looks at seconds that threads ran and waited since the one before."""
    crowd, ran, waited = Crowd((7.0, 9.0)), 7.0, 9.0
    for more_ran, more_waited in looks:
        ran, waited = ran + more_ran, waited + more_waited
        crowd.see((ran, waited))
    return crowd.is_there


def test_a_crowd_is_one_for_which_threads_wait():
    assert not seen((1, 0.05))
    assert seen((1, 0.5))
    assert not seen((0.01, 0.5))  # an engine that has nothing to do
    assert seen((1, 0.5), *[(1, 0.01)] * 9)
    assert not seen((1, 0.5), *[(1, 0.01)] * 10)
    assert seen((1, 0.5), *[(1, 0.01)] * 9, (1, 0.1), *[(1, 0.01)] * 9)
    assert seen((1, 0.5), *[(0.01, 0)] * 20)  # nor does a pause end it
    assert not seen((5, 0), (-3, -4), (1, 0))  # threads that have ended are counted no more


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
