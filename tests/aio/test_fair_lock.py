"""Turns are first come, first served: a thread that asks again at once does not starve others."""

import threading
import time

from mmdeploy_llm.aio.fair_lock import FairLock


def test_a_busy_thread_does_not_starve_the_others():
    lock, order = FairLock(), []
    begin = threading.Barrier(3)

    def work(name):
        begin.wait(10)
        for _ in range(20):
            with lock:
                order.append(name)
                time.sleep(0.002)  # until the others ask

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(order) == 60
    # Once all three ask, each three lock in a row belong to three threads.
    middle = order[6:54]
    assert all(len(set(middle[index : index + 3])) == 3 for index in range(0, 48, 3))


def test_only_one_thread_is_inside():
    lock, inside, most = FairLock(), [], []

    def work():
        for _ in range(200):
            with lock:
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(most) == {1}


def test_an_error_inside_passes_the_turn_on():
    lock = FairLock()
    try:
        with lock:
            raise KeyError
    except KeyError:
        pass
    with lock:
        pass
