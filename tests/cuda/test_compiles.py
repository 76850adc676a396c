"""Every kernel compiles for a GPU, whether there is one or not, and fits on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAX_SHARED = 227 * 1024  # bytes that a block may have on an H100
MAX_SPILLED = 64


def told_by(program, folder, *arguments):
    """The lines that a program of this folder prints, without Triton's interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    path = Path(__file__).with_name(program)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, path, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return told_by("compile_for_gpu.py", tmp_path_factory.mktemp("triton"), "bfloat16")


def test_no_step_waits_for_the_compiler(tmp_path):
    """All that a run launches was compiled in its warm-up, whatever its batches are like."""
    assert told_by("compile_a_run.py", tmp_path) == []


def test_all_kernels_compile(lines):
    """All that the modules define: a new kernel is launched by compile_for_gpu.py too."""
    folder = Path(__file__).parents[2] / "mmdeploy_llm" / "cuda"
    text = "".join(
        path.read_text() for path in folder.glob("*.py") if not path.name.startswith("paged")
    )
    launched = {
        name
        for name in re.findall(r"(\w+)\[.*\]\(\n? *", text)
        if re.search(rf"@triton\.jit.*\ndef {name}\(", text)
    }
    assert launched == {line.split()[0] for line in lines}


def test_kernels_fit(lines):
    for line in lines:
        numbers = dict(re.findall(r"(\w+) (\d+)", line))
        assert int(numbers["shared"]) <= MAX_SHARED, line
        assert int(numbers["spilled"]) <= MAX_SPILLED, line
        assert int(numbers["threads"]) * int(numbers["registers"]) <= 65536, line
