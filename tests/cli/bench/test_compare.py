"""compare.py runs engines in turn and tabulates the results; small programs act as engines."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Answers like a peer's runner and reports n seconds for the n-th request.
ENGINE = """
import json, sys
print("noise of an engine")
print('RESULT {"engine": "toy 1", "load": 0.5}', flush=True)
for number, line in enumerate(sys.stdin, start=1):
    asked = json.loads(line)
    print("noise", flush=True)
    answer = {"seconds": float(number), "num_tokens": asked["num"]}
    print("RESULT " + json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def compare(load_benchmark):
    return load_benchmark("compare")


@pytest.fixture
def engine(tmp_path):
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    return str(path)


def comes_to_a_stop(pid):
    """Returns whether the process is stopped within 20 s, or the system has no /proc."""
    state = Path(f"/proc/{pid}/stat")
    end = time.monotonic() + 60
    while state.exists() and state.read_text().rpartition(") ")[2][0] != "T":
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_runner_answers_and_is_stopped_in_between(compare, engine):
    runner = compare.Runner(sys.executable, engine, [])
    try:
        assert (runner.name, runner.load_seconds) == ("toy 1", 0.5)
        assert comes_to_a_stop(runner._process.pid)
        assert runner.ask(work="text", num=7) == {"seconds": 1.0, "num_tokens": 7}
        assert compare.measure(runner, "text", seed=0) == 32 / 2
        assert compare.measure(runner, "vl", seed=0) == 16 / 3
        # The reported times are 4 s for the first token and 5 s for 128 tokens.
        assert compare.measure(runner, "alone", seed=0) == pytest.approx(1000 / 127)
    finally:
        runner.close()
    assert runner._process.returncode is not None


TOLD = """
import contextlib, sys, time
import compare
compare.end_when_told()
with contextlib.ExitStack() as stack:
    runner = compare.Runner(sys.executable, sys.argv[1], [])
    stack.callback(runner.close)
    print(runner._process.pid, flush=True)
    time.sleep(600)
"""


def test_a_program_that_is_told_to_end_leaves_no_engine(compare, engine):
    """The processes of engines are stopped: no signal but SIGKILL ends them."""
    folder = Path(compare.__file__).parent
    words = [sys.executable, "-c", TOLD, engine]
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as program:
        pid = int(program.stdout.readline())
        program.terminate()
        assert program.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_engine_that_does_not_start_is_left_out_with_its_reason(compare, tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('no such model')")
    with pytest.raises(compare.RunnerError, match="no such model"):
        compare.Runner(sys.executable, str(broken), [])
    with pytest.raises(compare.RunnerError, match="no-python"):
        compare.Runner(str(tmp_path / "no-python"), str(broken), [])
    session, level = compare.SESSIONS[1], compare.LEVELS["best"]
    pythons = {compare.OURS: sys.executable}
    assert compare.run_session(session, pythons, tmp_path, 1, level) == []
    told = capsys.readouterr().err
    assert "openvino: left out, no --openvino was given" in told
    assert "mmdeploy_llm: left out, there is no folder" in told


class Toy:
    def __init__(self, name):
        self.name = name
        self.load_seconds = 2.0


def test_ratios_are_above_one_where_we_are_faster(compare):
    session, level = compare.SESSIONS[0], compare.LEVELS["best"]
    runners = {compare.OURS: Toy("mmdeploy_llm 0.1"), "openvino": Toy("OpenVINO 1")}
    found = {
        ("text", compare.OURS): [100.0, 120.0, 150.0],
        ("text", "openvino"): [100.0, 100.0, 100.0],
        ("alone", compare.OURS): [20.0, 20.0, 20.0],
        ("alone", "openvino"): [30.0, 50.0, 40.0],
    }
    rows = [
        compare.make_row(session, work, "openvino", runners, found, level)
        for work in ("text", "alone")
    ]
    assert [row.ratio for row in rows] == [1.2, 2.0]
    text = compare.section(rows, "8 cores", 3, level)
    row = "| text, qwen05 | bf16 | 120.0 tok/s | OpenVINO 1 | 100.0 tok/s | **1.20** "
    assert f"{row}(1.00, 1.20, 1.50) | 1.10 |" in text
    assert "| 20.0 ms/token | OpenVINO 1 | 40.0 ms/token | **2.00** (1.50, 2.50, 2.00) |" in text
    assert "qwen05 bf16: mmdeploy_llm 2.0, OpenVINO 1 2.0" in text


@pytest.mark.parametrize("name", ["best", "avx2"])
def test_the_section_replaces_what_is_between_the_markers(compare, tmp_path, name):
    level = compare.LEVELS[name]
    begin, end = level.markers
    path = tmp_path / "HISTORY.md"
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    compare.write(path, "new", level)
    compare.write(path, "newer", level)
    assert path.read_text() == f"before\n{begin}\nnewer\n{end}\nafter\n"
    path.write_text("without")
    with pytest.raises(SystemExit, match="has no lines"):
        compare.write(path, "new", level)
    assert path.read_text() == "without"


def test_engines_get_the_level_as_variables(compare, tmp_path):
    level = compare.LEVELS["avx2"]
    program = tmp_path / "engine.py"
    program.write_text(
        "import json, os\n"
        "value = os.environ.get('ONEDNN_MAX_CPU_ISA')\n"
        "print('RESULT ' + json.dumps({'engine': str(value), 'load': 0}), flush=True)\n"
    )
    runner = compare.Runner(sys.executable, str(program), [], level.variables)
    runner.close()
    assert runner.name == "AVX2"


@pytest.mark.parametrize(("flags", "is_held"), [("fma avx2", False), ("avx2 avx512f", True)])
def test_engines_are_held_to_a_level_where_there_is_more(compare, tmp_path, flags, is_held):
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}")
    level = compare.level_here("avx2", tmp_path / "cpuinfo")
    assert bool(level.variables) == is_held
    assert ("held to it" in level.note) != is_held
    assert level.arguments == compare.LEVELS["avx2"].arguments
    assert compare.level_here("best", tmp_path / "cpuinfo") == compare.LEVELS["best"]


def test_a_target_belongs_to_a_level(compare):
    session = compare.SESSIONS[1]
    assert compare.LEVELS["avx2"].target(session, "text", "llamacpp") == 1.5
    assert compare.LEVELS["best"].target(session, "text", "llamacpp") is None
    assert compare.LEVELS["avx2"].option == " --level avx2"


LLAMA = """#!{python}
import json, sys
asked = dict(zip(sys.argv[1::2], sys.argv[2::2]))
t = float(asked["-ntg"])
print("noise")
print(json.dumps({{"t_pp": 1000.0, "t": 1000.0 + t, "pp": asked["-npp"], "n": asked["-npl"]}}))
"""


def test_llama_cpp_is_asked_for_the_same_work(compare, tmp_path):
    program = tmp_path / "llama-batched-bench"
    program.write_text(LLAMA.format(python=sys.executable))
    program.chmod(0o755)
    arguments = ["--program", str(program), "--model", "models", "--precision", "int8"]
    runner = compare.Runner(sys.executable, "run_llamacpp.py", arguments)
    try:
        assert runner.name == "llama.cpp Q8_0"
        # 127 steps of one second each after the first token.
        assert compare.measure(runner, "alone", seed=0) == pytest.approx(1000)
        assert compare.measure(runner, "first", seed=0) == 1e6
        text = runner.ask(work="text", num=32, seed=0)
        assert text == {"seconds": 1061.0, "num_tokens": 32 * 62}
    finally:
        runner.close()
