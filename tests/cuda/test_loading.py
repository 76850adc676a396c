"""Triton is imported when kernels are asked for, and its absence is told."""

import subprocess
import sys

import pytest
import torch

from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.runner.parts import load_device_kernels

PROGRAM = """
import sys
import mmdeploy_llm.assembly, mmdeploy_llm.cuda, mmdeploy_llm.layers.install, mmdeploy_llm.sampling
print([name for name in sys.modules if name.startswith("mmdeploy_llm.cuda.")])
"""

NO_TRITON = """
import sys
import torch
from mmdeploy_llm import cuda
sys.modules["triton"] = None
print(cuda.load(torch.device("cuda")))
"""


def test_nothing_imports_the_kernels():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_triton():
    """Told once, with the reason; plain torch then computes."""
    done = subprocess.run([sys.executable, "-c", NO_TRITON], capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("no Triton kernels")
    assert "triton" in line.partition(":")[2]


@pytest.mark.parametrize(
    ("device", "native_kernels", "is_loaded"),
    [("cpu", None, False), ("cuda", False, False), ("cuda", None, True), ("cuda", True, True)],
)
def test_who_has_them(triton_device, device, native_kernels, is_loaded):
    config = EngineConfig(model="any", native_kernels=native_kernels)
    assert (load_device_kernels(config, torch.device(device)) is not None) == is_loaded
