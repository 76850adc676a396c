"""Finalizers run once: when they are called, their owner is collected or the program ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from mmdeploy_llm.system.processes import finalize_here

# Eight threads make and drop owners until the interpreter is gone.
BUSY_END = """
import sys, threading, time
from mmdeploy_llm.system.processes import finalize_here
sys.setswitchinterval(1e-6)
class Owner: pass
owners = [Owner() for _ in range(2000)]
ended = []
def end(number):
    ended.append(number)
    if number == 0:
        print(ended == list(range(1999, -1, -1)))
for number, owner in enumerate(owners):
    finalize_here(owner, end, number)
def make():
    while True:
        kept = [Owner() for _ in range(20)]
        for owner in kept:
            finalize_here(owner, int)
for _ in range(8):
    threading.Thread(target=make, daemon=True).start()
time.sleep(0.05)
"""


class Owner:
    """Stands for what owns a process or a folder."""


def test_a_finalizer_runs_once_where_its_owner_is_collected():
    calls = []
    owner = Owner()
    finalize = finalize_here(owner, calls.append, "end")
    del owner
    gc.collect()
    finalize()
    assert calls == ["end"]


def test_a_finalizer_that_was_called_is_not_run_again():
    calls = []
    owner = Owner()
    finalize_here(owner, lambda *names, **more: calls.append((names, more)), "a", at=1)()
    del owner
    gc.collect()
    assert calls == [(("a",), {"at": 1})]


@pytest.mark.parametrize(("at_exit", "shown"), [(True, "b\na\n"), (False, "")])
def test_the_end_of_the_program_runs_the_newest_first(at_exit, shown):
    program = f"""
from mmdeploy_llm.system.processes import finalize_here
class Owner: pass
owners = [Owner(), Owner(), Owner()]
finalize_here(owners[0], print, "a", at_exit={at_exit})
finalize_here(owners[1], print, "b", at_exit={at_exit})
gone = finalize_here(owners[2], int)
gone()
"""
    assert _run(program).stdout == shown


def test_an_error_at_the_end_of_the_program_stops_no_other():
    program = """
from mmdeploy_llm.system.processes import finalize_here
class Owner: pass
owner = Owner()
finalize_here(owner, print, "older")
finalize_here(owner, int, "no number")
"""
    found = _run(program)
    assert found.stdout == "older\n"
    assert "no number" in found.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_runs_none_of_its_parents():
    program = """
import os, sys
from mmdeploy_llm.system.processes import finalize_here
class Owner: pass
owner = Owner()
finalize_here(owner, lambda: print("ended", flush=True))
child = os.fork()
if child:
    os.waitpid(child, 0)
"""
    assert _run(program).stdout == "ended\n"


def test_threads_that_make_and_drop_owners_do_not_disturb_the_end():
    found = _run(BUSY_END)
    assert (found.stdout, found.returncode) == ("True\n", 0)
    assert "Error" not in found.stderr


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
