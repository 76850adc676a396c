"""The kernels for each level that this processor has, built once for all tests."""

import pytest
import torch

from mmdeploy_llm.native import BuildError, CpuKernels, Level, build, cpu_level

LEVELS = list(Level)[::-1]  # plainest first


@pytest.fixture(scope="session", params=LEVELS, ids=lambda level: level.name)
def kernels(request, tmp_path_factory):
    if LEVELS.index(request.param) > LEVELS.index(cpu_level()):
        pytest.skip(f"this processor has no {request.param.name}")
    try:
        return CpuKernels(build(request.param, tmp_path_factory.getbasetemp() / "kernels"))
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


@pytest.fixture(autouse=True)
def one_thread():
    """On small tensors handing work to others takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
