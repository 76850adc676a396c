"""Values travel between processes, and processes end in every way."""

import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Pipe

import numpy as np
import pytest
import torch

from mmdeploy_llm.errors import ConfigError, WorkerDiedError
from mmdeploy_llm.system.portable import children
from mmdeploy_llm.system.processes import Channel, Worker, close_all, process
from mmdeploy_llm.system.processes.wire import MAX_INLINE
from mmdeploy_llm.system.sharding import Meeting

LARGE = MAX_INLINE // 4 + 1000  # float32 values that go through shared memory


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    yield Channel(ours, os.getpid()), Channel(theirs, os.getpid())
    ours.close()
    theirs.close()


def through(ends, value):
    with ThreadPoolExecutor(1) as pool:  # what is long waits for the reader
        sending = pool.submit(ends[0].send, value)
        found = ends[1].receive()
        sending.result()
    return found


@pytest.mark.parametrize("count", [0, 1, 100, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors(ends, count, dtype):
    value = torch.arange(count).to(dtype)
    found = through(ends, {"x": value, "again": value})
    assert torch.equal(found["x"], value)
    assert found["x"].dtype is dtype
    found["x"].zero_()  # memory of its own


def test_large_tensors_of_several_shapes(ends):
    first, second = torch.randn(3, LARGE), torch.randn(LARGE, 5).T
    values = [first, second, torch.tensor(3.5)]
    found = through(ends, values)
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


def test_arrays_files_and_bytes(ends, tmp_path):
    (tmp_path / "file").write_bytes(b"contents")
    array = np.arange(LARGE, dtype=np.float32)
    with (tmp_path / "file").open("rb") as file:
        found = through(ends, (array, file, io.BytesIO(b"memory"), b"bytes" * LARGE))
    assert np.array_equal(found[0], array)
    assert (found[1].read(), found[2].read()) == (b"contents", b"memory")
    assert found[3] == b"bytes" * LARGE


def test_shared_memory_is_given_back(ends):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        through(ends, torch.zeros(LARGE))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_channel_says_so(ends):
    ends[0].connection.close()
    with pytest.raises(EOFError):
        ends[1].receive()


# Functions that workers run; they find this module through sys.path.


def echo(channel):
    while True:
        channel.send(channel.receive())


def fail(channel, error):
    channel.receive()
    raise error


def speak_and_die(channel, how):
    print("my last words", file=sys.stderr, flush=True)
    channel.receive()
    os.kill(os.getpid(), how) if how else os._exit(7)


def hang(channel):
    channel.send(os.getpid())
    time.sleep(1000)


def own(function, **options):
    """The function as the worker can import it."""
    module = __import__("test_messages")
    return partial(getattr(module, function.__name__), **options)


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(__file__))


@pytest.mark.full
def test_workers(capfd):
    """One that echoes, and all ways to end, at the same time: each takes seconds to start."""
    echoing = Worker("echo", own(echo))
    ours = Worker("ours", own(fail, error=ConfigError("wrong option")))
    theirs = Worker("theirs", own(fail, error=ValueError("what now")))
    killed = Worker("killed", own(speak_and_die, how=signal.SIGKILL))
    gone = Worker("gone", own(speak_and_die, how=None))
    for worker in (ours, theirs, killed, gone):
        worker.send(None)
    echoing.send([1, "two", torch.ones(LARGE)])
    found = echoing.receive()
    assert found[:2] == [1, "two"]
    assert torch.equal(found[2], torch.ones(LARGE))
    echoing.close()
    with pytest.raises(WorkerDiedError):
        echoing.send("more")
    with pytest.raises(ConfigError, match="wrong option"):
        ours.receive()
    with pytest.raises(WorkerDiedError, match="theirs failed: ValueError: what now; it wrote last"):
        theirs.receive()
    words = r"died with signal SIGKILL(.|\n)*my last words"
    with pytest.raises(WorkerDiedError, match=rf"killed \(process \d+\) {words}"):
        killed.receive()
    with pytest.raises(WorkerDiedError, match=r"gone .* died with exit status 7"):
        gone.receive()
    told = capfd.readouterr().err
    assert "my last words" in told
    assert "theirs failed" in told
    assert "ours failed" not in told, "the parent raises wrong options; no traceback precedes them"
    for worker in (ours, theirs, killed, gone):
        worker.close()


@pytest.mark.full
def test_workers_that_hang_are_closed_at_the_same_time(monkeypatch):
    """And nothing of them is left: no process, no open file, no thread."""
    monkeypatch.setattr(process, "CLOSE_SECONDS", 3.0)
    gc.collect()  # earlier tests may have left files to it
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    workers = [Worker(f"hanging {n}", own(hang)) for n in range(3)]
    pids = [worker.receive() for worker in workers]
    close, given = Worker.close, []
    monkeypatch.setattr(Worker, "close", lambda self, s: given.append(s) or close(self, s))
    close_all(workers)
    assert sum(max(0.0, seconds) for seconds in given) < 4.0  # not three times as long as one
    assert not any(is_alive(pid) for pid in pids)
    deadline = time.monotonic() + 600
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)  # they read to the end of what the process wrote
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_process_that_cannot_be_started_leaves_nothing_open(monkeypatch):
    def refused(*args, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(children.subprocess, "Popen", refused)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no more processes"):
        Worker("never", own(hang))
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.full
def test_a_worker_ends_with_its_parent(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import os, signal, test_messages\n"
        "from mmdeploy_llm.system.processes import Worker\n"
        "worker = Worker('w', test_messages.hang)\n"
        "print(worker.receive(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and is_alive(pid):
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_exchange_is_noticed_by_whoever_records_calls(tmp_path):
    """A recorded decode step must not leave out the sums between ranks."""
    from mmdeploy_llm.kernels.cpu.recording import _Watch

    ranks = Meeting(path=str(tmp_path / "ranks"), rank=0, size=1, device="cpu").join()
    x = torch.ones(4, 8)
    with _Watch() as watch:
        x = ranks.sum(x)
    assert watch.unknown is not None
    assert torch.equal(x, torch.ones(4, 8))
