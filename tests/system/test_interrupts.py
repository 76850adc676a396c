"""Ctrl-C in the program and in Python, once and twice, at any moment: no traceback, no process left
over. The children are real, and are interrupted as a terminal does it, all processes at once."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from mmdeploy_llm.cli.terminal import interrupts

PROGRAM = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else ignored where nohup has started the tests
from mmdeploy_llm.cli import main
sys.argv[0] = "mmdeploy-llm"
print("ready", file=sys.stderr, flush=True)
main()
"""
LINE = '{"prompt": "A red", "sampling_params": {"ignore_eos": true, "max_tokens": 500}}\n'
COMMANDS = {
    "batch": ["batch", "in.jsonl", "-o", "out.jsonl", "--overwrite"],
    "ranks": ["batch", "in.jsonl", "-o", "out.jsonl", "--engine", "tensor_parallel_size=2"],
    "engines": ["batch", "in.jsonl", "-o", "out.jsonl", "--engine", "data_parallel_size=2"],
    "chat": ["chat"],
    "count": ["count", *["in.jsonl"] * 40],  # more than a quick machine counts in 4 s
    "bench": ["bench", "--rounds", "99"],
}
IN_CI = ("batch", "chat")  # one that writes, one that reads the terminal; all end in one place


def interrupted(code, arguments, folder, *pauses, number=signal.SIGINT, is_group=True, begun=None):
    """Starts Python, waits until it is ready, and sends Ctrl-C, or another signal, after each
    pause. Returns its exit code and what it wrote to stderr; checks that none of its processes is
    left. is_group: the signal reaches all its processes, as that of a terminal does. begun: says
    when the pauses begin, if not at once."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert child.stderr.readline() == "ready\n"
    for pause in (0.05 + pauses[0], *pauses[1:]):
        while begun is not None and child.poll() is None and not begun():
            time.sleep(0.05)
        time.sleep(pause)
        if child.poll() is None:
            (os.killpg if is_group else os.kill)(child.pid, number)
    _, stderr = child.communicate(timeout=600)
    for _ in range(3000):  # a process that was just started notices a little later
        left = subprocess.run(["pgrep", "-g", str(child.pid)], capture_output=True).stdout
        if not left:
            break
        time.sleep(0.1)
    assert not left
    return child.returncode, stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "command",
    [pytest.param(n, marks=[pytest.mark.long] * (n not in IN_CI)) for n in COMMANDS],
)
def test_two_interrupts_end_a_command(command, tmp_path):
    (tmp_path / "in.jsonl").write_text(LINE * 2000)
    choose = random.Random(command)
    for _ in range(2):
        pauses = choose.uniform(0, 4), choose.choice([0, 0.01, 0.2])
        code, stderr = interrupted(PROGRAM, COMMANDS[command], tmp_path, *pauses)
        assert code == 130, stderr
        assert not any(word in stderr for word in ("Traceback", "ignored", "Error")), stderr


ENDS = {signal.SIGTERM: 143, signal.SIGHUP: 129}


RANKS = ("tensor_parallel_size=2",)
CASES = [(number, is_group, ()) for number in ENDS for is_group in (True, False)]
CASES += [(number, is_group, RANKS) for number in ENDS for is_group in (True, False)]
QUICKEST = ((signal.SIGTERM, True, ()), (signal.SIGHUP, False, ()))  # one process, each signal


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "is_group", "options"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case not in QUICKEST)) for case in CASES],
)
def test_the_end_of_a_job_ends_like_an_interrupt(number, is_group, options, tmp_path):
    """The output is closed, the summary and the report are written, and no rank is left."""
    (tmp_path / "in.jsonl").write_text(LINE.replace("500", "20") * 5000)
    words = ["batch", "in.jsonl", "-o", "out.jsonl", "--report", "out.html", "--num-threads", "1"]
    words += [word for option in options for word in ("--engine", option)]
    output = tmp_path / "out.jsonl"
    code, stderr = interrupted(
        PROGRAM,
        words,
        tmp_path,
        0.2,
        number=number,
        is_group=is_group,
        begun=lambda: output.exists() and output.stat().st_size > 0,
    )
    assert code == ENDS[number], stderr
    assert "the same command with --resume does them" in stderr
    assert not any(word in stderr for word in ("Traceback", "ignored", "Error")), stderr
    assert (tmp_path / "out.html").exists()
    assert json.loads((tmp_path / "out.jsonl.state.json").read_text())["ending"] == "interrupted"
    assert '"code": 500' not in (tmp_path / "out.jsonl").read_text()


def test_a_second_signal_ends_at_once_and_one_that_is_ignored_stays_so(monkeypatch):
    ended = []
    monkeypatch.setattr(interrupts, "end_now", ended.append)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray, which other tests import, has its own
    try:
        own = interrupts.Interrupts().__enter__()
        assert interrupts.interrupted_code() == 130
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(interrupts.Terminated):
            signal.raise_signal(signal.SIGTERM)
        assert (interrupts.interrupted_code(), ended) == (143, [])
        with pytest.raises(interrupts.Terminated):
            signal.raise_signal(signal.SIGTERM)
        assert ended == [143]
        own.forget()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert (interrupts.interrupted_code(), ended) == (130, [143])
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.unraisablehook = sys.__unraisablehook__


LIBRARY = """
import sys, os
from mmdeploy_llm import LLM, SamplingParams
import mmdeploy_llm.client.llm
print("ready", file=sys.stderr, flush=True)
try:
    options = {"quiet": True, "max_model_len": 1100, "num_threads": 1, **eval(sys.argv[1])}
    with LLM("shapes-vl", **options) as llm:
        llm.generate(["A red"] * 500, SamplingParams(max_tokens=1000, ignore_eos=True), False)
except KeyboardInterrupt:
    os._exit(5)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_in_python_the_interrupt_is_the_callers(options, tmp_path):
    choose = random.Random(str(options))
    for _ in range(2):
        pauses = choose.uniform(0, 4), choose.choice([0.01, 0.2])
        code, stderr = interrupted(LIBRARY, [str(options)], tmp_path, *pauses)
        assert (code, stderr) == (5, "")


@pytest.mark.parametrize(("module", "is_unfinished"), [("torch.nn", True), ("torch.nn", False)])
def test_while_torch_is_imported_the_process_ends_at_once(monkeypatch, module, is_unfinished):
    """An exception that passes through the C++ code of an import aborts the process."""
    ended = []
    monkeypatch.setattr(interrupts, "end_now", ended.append)
    monkeypatch.setattr(torch.__spec__, "_initializing", is_unfinished, raising=False)
    handle = interrupts.Interrupts()._handle
    names = {"__name__": module, "handle": handle, "sys": sys}
    with pytest.raises(KeyboardInterrupt):  # the end is only noted here
        exec("handle(2, sys._getframe())", names)
    assert ended == [130] * is_unfinished


def test_while_another_thread_imports_torch_the_command_is_told(monkeypatch):
    monkeypatch.setattr(torch.__spec__, "_initializing", True, raising=False)
    with pytest.raises(KeyboardInterrupt):
        interrupts.Interrupts()._handle(2, sys._getframe())
