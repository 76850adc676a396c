"""Triton is imported only when kernels are loaded, and a missing Triton is reported."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import mmdeploy_llm.engine.startup.start, mmdeploy_llm.kernels.cuda
import mmdeploy_llm.engine.runner.sampling
print([name for name in sys.modules if name.startswith("mmdeploy_llm.kernels.cuda.")])
"""

NO_TRITON = """
import sys
import torch
from mmdeploy_llm.kernels import cuda
sys.modules["triton"] = None
print(cuda.load(torch.device("cuda")))
"""


@pytest.mark.full
def test_nothing_imports_the_kernels():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.full
def test_without_triton():
    """The reason is reported once; plain torch then computes."""
    done = subprocess.run([sys.executable, "-c", NO_TRITON], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("no Triton kernels")
    assert "triton" in line.partition(":")[2]
