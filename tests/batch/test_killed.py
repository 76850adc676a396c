"""Runs killed at any point are resumed until complete: every item has one record, and no finished
item is run again."""

import itertools
import random
import subprocess
import sys

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import read_records
from mmdeploy_llm.testing.tiny import write_tiny

NUM_ITEMS, NUM_KILLS, MAX_SECONDS = 150, 5, 1800

# Runs the batch in child processes. Kills each but the last with SIGKILL once the output has grown
# by the given number of records and the given milliseconds have passed. Prints the exit code and
# the number of records after each; a part counts as full.
PROGRAM = """
import os, signal, sys, time
import mmdeploy_llm, mmdeploy_llm.client.llm

PART_ITEMS = 20
model, source, output, *kills = sys.argv[1:]

def batch():
    with mmdeploy_llm.LLM(model=model, num_threads=1, max_num_seqs=4, max_model_len=128,
                          kv_cache_memory=2**24, use_warmup=False) as llm:
        params = mmdeploy_llm.SamplingParams(max_tokens=4, temperature=0)
        llm.run_batch(source, output, resume=True, sampling_params=params, use_tqdm=False,
                      part_items=None if output.endswith(".jsonl") else PART_ITEMS)

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:  # it has just become a part
        return b""

def lines():
    if output.endswith(".jsonl"):
        return read(output).count(b"\\n")
    names = os.listdir(output) if os.path.isdir(output) else ()
    if output.endswith(".tar"):
        return sum(read(f"{output}/{name}").count(b'"sample": {') for name in names)
    full = sum(PART_ITEMS for name in names if name.startswith("part-"))
    return full + sum(read(f"{output}/{n}").count(b"\\n") for n in names if n.endswith(".jsonl"))

for kill in [*kills, None]:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            batch()
            code = 0
        finally:
            os._exit(code)
    if kill is not None:
        num_lines, delay = kill.split("+")
        wanted = lines() + int(num_lines)
        while lines() < wanted and os.waitid(
            os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        time.sleep(float(delay) / 1000)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), lines(), flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny("qwen2", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out.tar"])
def test_a_program_killed_at_random_points_loses_and_doubles_nothing(model, jsonl, tmp_path, name):
    rows = [{"id": f"item-{number}", "prompt": f"The fox {number}"} for number in range(NUM_ITEMS)]
    rows.insert(NUM_ITEMS // 2, "no json")
    source, output = jsonl(*rows), tmp_path / name
    chance = random.Random(7)
    kills = [f"{chance.randrange(25)}+{chance.randrange(30)}" for _ in range(NUM_KILLS)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(source), str(output), *kills],
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes, counts = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert codes == (-9,) * NUM_KILLS + (0,), done.stderr
    # Each run keeps what the previous one left, except the failed line, which it retries, and the
    # part that is being replaced is counted once or twice.
    slack = 1 if name == "out.jsonl" else 20
    assert all(after >= before - slack for before, after in itertools.pairwise(counts))
    records = [entry.record for entry in open_sink(output).entries()]
    assert sorted(record.line for record in records) == list(range(1, len(rows) + 1))
    ids = [record.id for record in records if record.is_ok]
    assert sorted(ids) == sorted(row["id"] for row in rows if row != "no json")


@pytest.mark.full
def test_an_output_cut_at_any_byte_is_completed(fake_llm, jsonl, tmp_path):
    source = jsonl({"prompt": "a"}, "{", {"id": "ü", "prompt": "bad"}, {"prompt": "d"})
    output = tmp_path / "out.jsonl"
    run_batch(plan_batch(source, output, BatchSettings()), lambda: fake_llm)
    whole = output.read_bytes()
    ends = [0, *(at + 1 for at, byte in enumerate(whole) if byte == ord("\n"))]
    near = {end + by for end in ends for by in (-2, -1, 0, 1, 2)}  # where a record begins or ends
    for cut in sorted((near & set(range(len(whole) + 1))) | set(range(0, len(whole), 31))):
        output.write_bytes(whole[:cut])
        begin = whole[: whole.rfind(b"\n", 0, cut) + 1]
        good = [line for line in begin.splitlines() if b'"error": null' in line]
        job = plan_batch(source, output, BatchSettings(mode="resume"))
        run_batch(job, lambda: fake_llm)
        assert sorted(record.line for record in read_records(output)) == [1, 2, 3, 4]
        assert set(good) <= set(output.read_bytes().splitlines())


NUM_ROWS = 120  # more than a busy machine answers before the thread below has its turn
INTERRUPTED = """
import os, signal, sys, threading, time
import mmdeploy_llm.client.llm
from mmdeploy_llm.cli import main

output = sys.argv[sys.argv.index("-o") + 1]

def press():
    while not os.path.exists(output) or os.path.getsize(output) == 0:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
main()
"""


@pytest.mark.full
def test_ctrl_c_in_a_real_program_is_clean_and_the_rest_is_done_later(
    model, jsonl, tmp_path, run_program
):
    rows = [{"prompt": f"The fox {number}"} for number in range(NUM_ROWS)]
    source, output = jsonl(*rows), tmp_path / "out.jsonl"
    words = ["batch", str(source), "-o", str(output), "--model", str(model), "--max-tokens", "8"]
    words += ["--num-threads", "1", "--max-num-seqs", "2", "--temperature", "0"]
    words += ["--engine", "kv_cache_memory=16777216", "--engine", "max_model_len=128"]
    stopped = run_program(INTERRUPTED, *words, timeout=MAX_SECONDS)
    assert stopped.returncode == 130, stopped.stderr
    assert "the same command with --resume" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    num_done = len(list(read_records(output)))
    assert 0 < num_done < NUM_ROWS
    assert f"stopped with {NUM_ROWS - num_done} left" in stopped.stderr
