"""How programs that use AsyncLLM end: at their last line, by Ctrl-C, in a forked process, after the
death of a worker."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmdeploy_llm import AsyncLLM, SamplingParams, WorkerDiedError
from mmdeploy_llm.testing.tiny import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12)
LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
OPTIONS = {"block_size": 16, "max_model_len": 1100, "use_warmup": False, "quiet": True}

BEGIN = """
import asyncio, os, sys, time
from mmdeploy_llm import AsyncLLM, EngineError, SamplingParams
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
llm = AsyncLLM(sys.argv[1], max_model_len=512, quiet=True, **eval(sys.argv[2]))
handles = [llm.submit("The quick brown fox", LONG) for _ in range(40)]
handles[0].get()
print(time.time(), flush=True)
"""
ENDS = {
    "last line": "",
    "exit": "sys.exit(0)",
    "handles are gone": "del handles, llm",
    "in a loop": """
async def main():
    tasks = [asyncio.create_task(anext(llm.submit("a", LONG))) for _ in range(3)]
    await asyncio.sleep(0.01)
asyncio.run(main())
""",
}


@pytest.fixture
def run(run_program):
    """Runs a program; returns the seconds from its last print to its end."""

    def ran(code, folder, options=None):
        done = run_program(BEGIN + code, folder, options or {}, timeout=1800)
        end = time.time()
        assert (done.returncode, done.stderr) == (0, "")
        return end - float(done.stdout.split()[-1])

    return ran


@pytest.fixture
def in_time(run):
    """Whether the program ends within 2 seconds, besides what the interpreter takes by itself on a
    busy machine."""

    def is_in_time(code, *where):
        own = run("llm.close()\nprint(time.time(), flush=True)\n", *where)
        return any(run(code, *where) < 2 + own for _ in range(2))

    return is_in_time


@pytest.mark.full
@pytest.mark.parametrize(
    "end", [pytest.param(name, marks=[pytest.mark.long] * (name != "exit")) for name in ENDS]
)
def test_a_program_ends_with_requests_in_flight(tiny_folder, in_time, end):
    assert in_time(ENDS[end], tiny_folder("mistral"))


@pytest.mark.long
@pytest.mark.parametrize("option", ["tensor_parallel_size", "data_parallel_size"])
def test_a_program_of_several_processes_ends(tiny_folder, in_time, option):
    assert in_time("", tiny_folder("mistral"), {option: 2})


@pytest.mark.full
def test_ranks_compute_for_handles(tiny_folder, reference_of):
    expected = reference_of("mistral").generate("a")
    with AsyncLLM(str(tiny_folder("mistral")), tensor_parallel_size=2, **OPTIONS) as llm:
        handles = [llm.submit("a", GREEDY) for _ in range(3)]
        assert [list(handle.result(60).outputs.token_ids) for handle in handles] == [expected] * 3


@pytest.mark.full
def test_a_forked_process_is_refused(tiny_folder, run):
    run(
        """
pid = os.fork()
if not pid:
    refused = 0
    for call in (lambda: llm.submit("a"), llm.stats, llm.close, llm.finish):
        try:
            call()
        except EngineError as error:
            refused += "forked from it" in str(error)
    os._exit(0 if refused == 4 else 1)
assert os.waitpid(pid, 0)[1] == 0
assert handles[1].result().is_ok
llm.close()
print(time.time())
""",
        tiny_folder("mistral"),
    )


INTERRUPTED = """
try:
    print("interrupt me", flush=True)
    handles[39].result()
except KeyboardInterrupt:
    assert not handles[39].is_finished  # the wait was interrupted, not the request
    output = llm.submit("a", SamplingParams(max_tokens=3)).result()
    assert output.is_ok
    llm.close()
    os._exit(5)
"""


@pytest.mark.full
def test_ctrl_c_reaches_the_caller_only(tiny_folder):
    child = subprocess.Popen(
        [sys.executable, "-c", BEGIN + INTERRUPTED, str(tiny_folder("mistral")), "{}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while child.stdout.readline() not in ("interrupt me\n", ""):
        pass
    os.killpg(child.pid, signal.SIGINT)
    _, stderr = child.communicate(timeout=600)
    assert (child.returncode, stderr) == (5, "")


def children():
    """Pids of this process's children that compute."""
    listed = subprocess.run(
        ["pgrep", "-P", str(os.getpid())], capture_output=True, text=True
    ).stdout.split()
    return [
        int(pid)
        for pid in listed
        if re.search(rb"engine|spawn", Path(f"/proc/{pid}/cmdline").read_bytes())
    ]


def go_on_asking(llm):
    for _ in range(100):
        llm.submit("a", GREEDY).result(60)
        time.sleep(0.05)


@pytest.mark.full
@pytest.mark.usefixtures("cold_children")  # which are known by their command lines
def test_a_killed_worker_takes_only_its_own_requests(tiny_folder, reference_of):
    expected = reference_of("mistral").generate("a")
    before = set(children())
    with AsyncLLM(str(tiny_folder("mistral")), data_parallel_size=2, **OPTIONS) as llm:
        handles = [llm.submit("The quick brown fox", LONG) for _ in range(8)]
        for handle in handles:
            handle.get()
        first, second = sorted(set(children()) - before)[:2]
        os.kill(first, signal.SIGKILL)
        outputs = [handle.result(timeout=60) for handle in handles]
        ended = [output.outputs.finish_reason for output in outputs]
        assert 0 < ended.count("error") < 8
        assert {output.error_code for output in outputs} == {200, 500}
        assert list(llm.submit("a", GREEDY).result(60).outputs.token_ids) == expected
        os.kill(second, signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            go_on_asking(llm)


CHAT = """
import sys
from mmdeploy_llm.cli import main
sys.argv[0] = "mmdeploy-llm"
main()
"""


@pytest.mark.full
def test_ctrl_c_ends_an_answer_of_the_chat_and_not_the_session(tmp_path):
    write_tiny("llama", tmp_path, max_position_embeddings=8192)
    generation = tmp_path / "generation_config.json"
    settings = json.loads(generation.read_text())
    generation.write_text(json.dumps({**settings, "eos_token_id": []}))
    options = ["--model", str(tmp_path), "--max-tokens", "6000"]
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", CHAT, "chat", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    child.stdin.write("hello\n")
    child.stdin.flush()
    assert child.stdout.read(4)  # the answer has begun
    os.killpg(child.pid, signal.SIGINT)
    _, stderr = child.communicate("/what\n", timeout=600)
    assert child.returncode == 0, stderr
    assert "stopped" in stderr
    assert "/image PATH" in stderr  # the next line was read
    assert "Traceback" not in stderr
