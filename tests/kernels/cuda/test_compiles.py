"""Every kernel compiles for a GPU, with or without one in the machine, and fits on it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.triton]

MAX_SHARED = 227 * 1024  # bytes that a block may have on an H100
MAX_SPILLED = 64


@pytest.fixture(scope="module")
def lines_of(pytestconfig):
    """lines_of(program, ...) -> the lines that a program of this folder prints, without Triton's
    interpreter. What it compiles is kept for later runs."""
    pytest.importorskip("triton", reason="needs triton, which the extra 'dev' installs")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(pytestconfig.cache.mkdir("triton"))

    def lines_of(program, *arguments):
        command = [sys.executable, Path(__file__).with_name(program), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return lines_of


@pytest.fixture(scope="module")
def lines(lines_of):
    return lines_of("compile_for_gpu.py", "bfloat16")


@pytest.mark.long
def test_no_step_waits_for_the_compiler(lines_of):
    """The warm-up compiles every kernel that a run launches, for batches of any kind."""
    assert lines_of("compile_a_run.py") == []


def test_all_kernels_compile(lines):
    """Checks that compile_for_gpu.py launches every kernel that the modules define, new ones
    too."""
    folder = Path(__file__).parents[3] / "mmdeploy_llm/kernels/cuda"
    text = "".join(
        path.read_text() for path in folder.glob("*.py") if not path.name.startswith("paged")
    )
    launched = {
        name
        for name in re.findall(r"(\w+)\[.*\]\(\n? *", text)
        if re.search(rf"@triton\.jit.*\ndef {name}\(", text)
    }
    assert launched == {line.split()[0] for line in lines}


# Bytes of shared memory that a block may have, by compute capability: A100, RTX 40, B200, RTX 50.
SHARED = {80: 163 * 1024, 89: 99 * 1024, 100: 227 * 1024, 120: 99 * 1024}


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED)
def test_products_of_few_bits_fit_other_gpus(lines_of, capability):
    lines = lines_of("compile_for_gpu.py", "bfloat16", str(capability))
    names = {"_few_rows", "_dequantize", "_round_rows", "_scale_sums"}
    assert {line.split()[0] for line in lines} == names
    for line in lines:
        numbers = dict(re.findall(r"(\w+) (\d+)", line))
        assert int(numbers["shared"]) <= SHARED[capability], line
        assert int(numbers["spilled"]) <= MAX_SPILLED, line


def test_kernels_fit(lines):
    for line in lines:
        numbers = dict(re.findall(r"(\w+) (\d+)", line))
        assert int(numbers["shared"]) <= MAX_SHARED, line
        assert int(numbers["spilled"]) <= MAX_SPILLED, line
        assert int(numbers["threads"]) * int(numbers["registers"]) <= 65536, line
