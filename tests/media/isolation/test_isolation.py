"""Worker processes return results and errors, and a failing one harms only its own item."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mmdeploy_llm.errors import MediaError, MediaLimitError, MediaTimeoutError
from mmdeploy_llm.hooks.files import load_file
from mmdeploy_llm.media.isolation import Workers

FUNCTIONS = """
import os, signal, time
import numpy as np
from mmdeploy_llm.errors import MediaLimitError

def halves(blob, count):
    for number in range(count):
        yield {"number": number, "pid": os.getpid()}, np.frombuffer(blob, np.uint8) // 2

def refuse(blob):
    raise MediaLimitError("too much of it")
    yield

def break_down(blob):
    raise RuntimeError("secret words of /a/path at 0xdeadbeef")
    yield

def hang(blob):
    yield {"pid": os.getpid()}, None
    time.sleep(1000)

def die(blob):
    yield {}, None
    os.kill(os.getpid(), signal.SIGKILL)

def devour(blob):
    np.ones(3 << 30, np.uint8)
    yield {}, None

def loaded(blob, names):
    import sys
    import mmdeploy_llm.media.video.files
    yield {"names": [name for name in names if name in sys.modules]}, None

def nonsense(blob):
    os.write(int(__import__("sys").argv[-1].split(':')[1]), b"\\xff" * 4096)
    yield {}, None
"""
LIMITS = {"timeout": 60.0, "max_memory": 2 * 2**30}


@pytest.fixture
def workers(tmp_path, monkeypatch):
    (tmp_path / "isolated_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    found = Workers()
    yield found
    found.close()


def call(workers, name, blob=b"", limits=LIMITS, **args):
    return list(workers.stream(f"isolated_functions:{name}", blob, args, **limits))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pid_of(workers):
    return call(workers, "halves", b"x", count=1)[0][0]["pid"]


def test_answers_come_back(workers):
    answers = call(workers, "halves", bytes([2, 4, 250]), count=3)
    assert [fields["number"] for fields, _ in answers] == [0, 1, 2]
    assert all(np.array_equal(array, [1, 2, 125]) for _, array in answers)
    assert answers[0][0]["pid"] != os.getpid()


def test_a_worker_is_used_again(workers):
    assert pid_of(workers) == pid_of(workers)


@pytest.mark.full
def test_a_worker_starts_in_little_time(workers, cold_children):
    """What reads media needs no schemas and no metadata of packages."""
    ((fields, _),) = call(workers, "loaded", names=["torch", "pydantic", "packaging"])
    assert fields["names"] == []


def test_errors_keep_their_class_and_the_worker(workers):
    before = pid_of(workers)
    with pytest.raises(MediaLimitError, match="too much of it"):
        call(workers, "refuse")
    assert pid_of(workers) == before


def test_other_errors_say_nothing_of_the_inside(workers):
    with pytest.raises(MediaError, match=r"cannot be decoded \(RuntimeError") as caught:
        call(workers, "break_down")
    assert "secret" not in str(caught.value)


@pytest.mark.full
def test_a_hanging_codec_is_killed(workers):
    pid_of(workers)
    stream = workers.stream("isolated_functions:hang", b"", {}, timeout=2.0, max_memory=2**31)
    fields, _ = next(stream)
    begin = time.monotonic()
    with pytest.raises(MediaTimeoutError, match="2 seconds"):
        next(stream)
    assert time.monotonic() - begin < 60
    assert not is_alive(fields["pid"])
    assert call(workers, "halves", b"x", count=1)


def test_a_dying_codec(workers):
    with pytest.raises(MediaError, match=r"died.*SIGKILL"):
        call(workers, "die")
    assert call(workers, "halves", b"x", count=1)


@pytest.mark.full
def test_a_worker_killed_from_outside_while_idle(workers):
    os.kill(pid_of(workers), signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(MediaError, match="died"):
        call(workers, "halves", b"x", count=1)
    assert call(workers, "halves", b"x", count=1)


def test_a_codec_that_wants_all_memory(workers):
    with pytest.raises(MediaLimitError, match="more than the 2048 MiB"):
        call(workers, "devour")


@pytest.mark.full
def test_nonsense_on_the_wire(workers):
    with pytest.raises(MediaError, match="an invalid answer"):
        call(workers, "nonsense")
    assert call(workers, "halves", b"x", count=1)


@pytest.mark.full
def test_a_stream_that_is_left(workers):
    stream = workers.stream("isolated_functions:halves", b"x", {"count": 1000}, **LIMITS)
    fields, _ = next(stream)
    stream.close()
    assert not is_alive(fields["pid"])


def test_threads_have_workers_of_their_own(workers):
    found, meeting = set(), threading.Barrier(3)

    def work():
        stream = workers.stream("isolated_functions:halves", b"x", {"count": 2}, **LIMITS)
        found.add(next(stream)[0]["pid"])
        meeting.wait(timeout=60)
        list(stream)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3


@pytest.mark.full
def test_close_and_forgetting_end_all(workers):
    pid = pid_of(workers)
    workers.close()
    assert not is_alive(pid)
    other = Workers()
    pid = pid_of(other)
    del other
    gc.collect()
    assert not is_alive(pid)


@pytest.mark.full
def test_no_worker_outlives_its_parent(tmp_path):
    (tmp_path / "isolated_functions.py").write_text(FUNCTIONS)
    code = (
        "import os, signal\n"
        "from mmdeploy_llm.media.isolation import Workers\n"
        "w = Workers()\n"
        "[(fields, _)] = w.stream('isolated_functions:halves', b'x', {'count': 1}, timeout=20,"
        " max_memory=2**31)\n"
        "print(fields['pid'], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    deadline = time.monotonic() + 60
    while is_alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(int(done.stdout))


def test_a_function_of_a_single_file_is_given_itself(workers, tmp_path):
    file = tmp_path / "one_file.py"
    file.write_text('def count(blob, step):\n    yield {"size": len(blob) * step}, None\n')
    [(found, _)] = workers.stream(load_file(file).count, b"abc", {"step": 2}, **LIMITS)
    assert found == {"size": 6}

    def inner(blob):
        yield {}, None

    with pytest.raises(ValueError, match="no function at the top level of a module"):
        next(workers.stream(inner, b"", {}, **LIMITS))
