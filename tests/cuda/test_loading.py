"""Triton is imported when kernels are asked for, and its absence is told."""

import logging
import subprocess
import sys

import pytest
import torch

from mmdeploy_llm import cuda
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.runner.parts import load_device_kernels

PROGRAM = """
import sys
import mmdeploy_llm.assembly, mmdeploy_llm.cuda, mmdeploy_llm.layers.kernels, mmdeploy_llm.sampling
print([name for name in sys.modules if name.startswith("mmdeploy_llm.cuda.")])
"""


def test_nothing_imports_the_kernels():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_triton(monkeypatch, caplog):
    """Once, with the reason; plain torch then computes."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("mmdeploy_llm.cuda.")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING):
        assert cuda.load(torch.device("cuda")) is None
    (record,) = caplog.records
    assert "no Triton kernels" in record.getMessage()
    assert "triton" in record.getMessage().split(":")[1]


@pytest.mark.parametrize(
    ("device", "native_kernels", "is_loaded"),
    [("cpu", None, False), ("cuda", False, False), ("cuda", None, True), ("cuda", True, True)],
)
def test_who_has_them(triton_device, device, native_kernels, is_loaded):
    config = EngineConfig(model="any", native_kernels=native_kernels)
    assert (load_device_kernels(config, torch.device(device)) is not None) == is_loaded
