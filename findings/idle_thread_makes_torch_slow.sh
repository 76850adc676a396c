#!/usr/bin/env bash
# torch 2.13.0 from PyPI on Linux: one addition in a second thread, which is idle from then on, makes
# every later operation of the first thread that runs on several cores slower, for as long as the second
# one lives. Additions of 200,000 floats, two CPUs and two threads of torch:
#
#     alone                                                    14 to 25 microseconds each
#     while the second thread waits for an event               80 to 135
#     after it has ended                                       15 to 20
#
# Each Python thread that computes gets a pool of its own in GNU's OpenMP, which stays until the thread
# ends. The runtime counts the threads of all pools, whether or not they do anything. As soon as there
# are more than CPUs, it no longer lets them wait awake between two loops but has them sleep at once, and
# to wake one takes longer than the loop. It is so where torch has as many threads as there are CPUs (most
# virtual machines and containers; with two hardware threads for each core torch takes half as many).
# Nothing tells; the processor looks idle. A data loader, a server's worker or a second model that
# computed once in a thread is enough. Have one thread compute, or end the others, or give torch half of
# the CPUs. OMP_WAIT_POLICY=active helps too, but then the threads of a program that is alone spin for
# minutes after its last loop.
#
# Seen with Python 3.11, Linux x86-64 (2-core Zen 3), 2026-11-30. Needs Python 3.11 or newer, two CPUs
# that nothing else uses, the package index, 1 GB of disk (more where pip takes the CUDA build).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet --disable-pip-version-check install torch==2.13.0 numpy==2.3.4
cd "$folder"
env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT venv/bin/python - <<'PYTHON'
import os
import threading
import time

import torch

torch.set_num_threads(len(os.sched_getaffinity(0)))
print("torch", torch.__version__, "on", torch.get_num_threads(), "threads")
assert torch.get_num_threads() > 1
x = torch.ones(200_000)


def microseconds():
    """Of one addition, the best of ten rounds."""
    rounds = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(1000):
            torch.add(x, 1, out=x)
        rounds.append(time.perf_counter() - begin)
    return min(rounds) * 1e3


computed, end = threading.Event(), threading.Event()


def compute_once():
    torch.add(x, 1)
    computed.set()
    end.wait()


alone = microseconds()
thread = threading.Thread(target=compute_once)
thread.start()
computed.wait()
beside = microseconds()
end.set()
thread.join()
after = microseconds()
print(f"alone {alone:.0f} us, beside an idle thread {beside:.0f} us, after its end {after:.0f} us")
assert beside > 2 * alone, "an idle thread no longer makes additions slower"
assert beside > 2 * after, "the end of the thread does not help"
PYTHON
