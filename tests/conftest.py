"""Shared by all tests."""

import importlib.util
import os
from pathlib import Path

import pytest

# Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def load_file():
    """A module of helpers by its path below tests/, which is no package."""

    def load(name):
        path = Path(__file__).parent / name
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
