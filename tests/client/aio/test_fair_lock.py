"""Turns are first come, first served: a thread that asks again at once does not starve others."""

import threading
import time

from mmdeploy_llm.client.aio.pool import FairLock


def test_a_busy_thread_does_not_starve_the_others():
    lock, order, busy = FairLock(), [], set("abc")

    def work(name):
        for _ in range(20):
            with lock:
                order.append(name)
                while len(lock._waiting) < len(busy) - 1:  # until the others ask
                    time.sleep(0.001)
        busy.remove(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
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
        thread.join(60)
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
