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


@pytest.fixture(scope="session")
def build_kernels(pytestconfig):
    """build_kernels(level) -> the library, built once for all processes and runs of the tests."""
    from filelock import FileLock

    from mmdeploy_llm.native import build

    folder = pytestconfig.cache.mkdir("kernels")

    def built(level):
        with FileLock(folder / f"{level.name}.lock"):
            return build(level, folder)

    return built


@pytest.fixture(scope="session")
def kernels():
    """The CPU's; tests/native and tests/cuda have others."""
    from mmdeploy_llm.native import BuildError, load

    try:
        return load()
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.fixture(scope="session")
def triton_device(load_file):
    """Where Triton's kernels run: on the GPU, or on the CPU in the interpreter."""
    pytest.importorskip("triton", reason="triton is not installed")
    import torch

    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    with load_file("interpreter.py").mended():
        yield torch.device("cpu")
