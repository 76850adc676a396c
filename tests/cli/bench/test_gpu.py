"""gpu.py on the CPU with small models: every part yields its rows, and a part that fails or hangs
becomes a row of the table."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "benchmarks" / "gpu.py"
GOOD_PART = """
import json, sys
print("noise")
print("ROW " + json.dumps({"work": "machine", "measured": "fast", "note": sys.argv[1]}))
"""
BAD_PART = """
import json
row = {"work": "decode, 7B, batch 1", "share": 0.8, "target": 0.75}
print("ROW " + json.dumps(row), flush=True)
raise RuntimeError("CUDA out of memory")
"""
HANGING_PART = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("begun", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def gpu(load_benchmark):
    return load_benchmark("gpu")


@pytest.fixture(scope="module")
def shared(load_benchmark):
    return load_benchmark("gpu_shared")


def run(gpu, tmp_path, code, name, limit=60.0):
    script = tmp_path / "part.py"
    script.write_text(code)
    return gpu.run_part(name, ["--device", "cpu"], limit, script)


def test_rows_of_a_part(gpu, tmp_path):
    result = run(gpu, tmp_path, GOOD_PART, "machine")
    assert result.problem is None
    assert result.rows == [{"work": "machine", "measured": "fast", "note": "machine"}]


def test_a_part_that_fails_keeps_its_rows_and_says_why(gpu, tmp_path):
    result = run(gpu, tmp_path, BAD_PART, "qwen")
    assert result.problem == "RuntimeError: CUDA out of memory"
    rows = gpu.rows_of([result])
    assert [row["work"] for row in rows] == [
        "decode, 7B, batch 1",
        "decode, 7B, batch ...",
        "prefill ...",
        "step overhead ...",
        "vl: ...",
        "vl, to transformers generate",
    ]
    assert gpu.cells(rows[0])[3:] == ["80 %", "75 %", "yes"]
    assert all("failed: RuntimeError: CUDA out of memory" in row["measured"] for row in rows[1:-1])


@pytest.mark.full
def test_a_part_that_hangs_is_ended_with_what_it_started(gpu, tmp_path):
    begin = time.monotonic()
    result = run(gpu, tmp_path, HANGING_PART, "start", limit=2.0)
    assert time.monotonic() - begin < 60
    assert result.problem == "stopped after 2 s"
    assert "failed: stopped after 2 s" in gpu.table(gpu.rows_of([result]))


def test_targets(gpu):
    def met(**row):
        return gpu.cells({"work": "w", **row})[-1]

    assert (met(share=0.5, target=0.5), met(share=0.49, target=0.5)) == ("yes", "no")
    assert (met(value=0.2, target=0.3), met(value=0.3, target=0.3)) == ("yes", "no")
    assert met(value=-0.1, target=0.3) == "no"  # a measurement error
    assert (met(done=True), met(measured="reported only")) == ("yes", "")


def test_time_on_the_device_counts_once(shared):
    """A profile reports a kernel's time on the kernel and on the host call that launched it."""
    from torch.autograd import DeviceType

    def event(device, time, *, is_user_annotation=False):
        return SimpleNamespace(
            device_type=device, self_device_time_total=time, is_user_annotation=is_user_annotation
        )

    events = [
        event(DeviceType.CPU, 30.0),
        event(DeviceType.CUDA, 10.0),
        event(DeviceType.CUDA, 20.0),
        event(DeviceType.CUDA, 50.0, is_user_annotation=True),
    ]
    assert shared.kernel_microseconds(events) == 30.0


@pytest.mark.full
def test_requests_that_end_before_the_last_one_begins(tmp_path, monkeypatch, shared, capsys):
    """The first requests end before the last begin, as in the warm-up of a large batch."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu_models

    (tmp_path / "machine.json").write_text(json.dumps({"flops": 1e11, "bandwidth": 1e10}))
    part = shared.Part("cpu", replace(shared.TINY, decode=40), tmp_path)
    folder = gpu_models.write_qwen(tmp_path / "qwen", is_tiny=True)
    with part.llm(folder, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=128) as llm:
        measured = shared.Measured(part, llm, folder)
        with pytest.raises(RuntimeError, match="all 32 requests decoded"):
            measured.decode_seconds(32, 16, 4)
        measured.decode("decode", 32, 16, 0.6)
    assert '"work": "decode"' in capsys.readouterr().out


def test_the_ratio_needs_both(gpu):
    ours = {"work": "vl: 448 x 448", "images": 40.0}
    theirs = {"work": "transformers generate, the same", "images": 8.0}
    assert gpu.ratio_rows([{"work": "machine"}]) == []
    for rows in ([ours], [theirs], [ours, {"work": "transformers generate ..."}]):
        assert gpu.cells(gpu.ratio_rows(rows)[0])[1:] == [
            "needs both parts",
            "",
            "",
            "4 times",
            "no",
        ]
    (row,) = gpu.ratio_rows([ours, theirs])
    assert row["measured"] == "5.0 times the images/s"
    assert gpu.cells(row)[-2:] == ["4 times", "yes"]


@pytest.mark.long
def test_all_parts_with_small_models_on_the_cpu(gpu, tmp_path):
    rows = tmp_path / "rows.json"
    options = ["--device", "cpu", "--size", "tiny", "--folder", str(tmp_path), "--json", str(rows)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads(rows.read_text())
    assert not [row for row in found if "failed" in row.get("measured", "")]
    names = [row["work"] for row in found]
    for works in gpu.WORKS.values():
        for work in works:
            assert any(name.startswith(work) for name in names), work
    assert names[-1] == "vl, to transformers generate"
    assert done.stdout.count("| vl, to transformers generate") == 1
    assert not list(tmp_path.glob("tmp*"))  # configs and weights are removed
