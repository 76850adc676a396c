"""The kernels for the instruction sets of this processor."""

import pytest
import torch

from mmdeploy_llm.native import BuildError, CpuKernels, Level, cpu_level

LEVELS = list(Level)[list(Level).index(cpu_level()) :]  # best first, PORTABLE last


def loaded(level, build_kernels):
    try:
        return CpuKernels(build_kernels(level))
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


def describe(level):
    return "best" if level is LEVELS[0] else level.name.lower()


@pytest.fixture(
    scope="session", params=sorted({LEVELS[0], LEVELS[-1]}, key=LEVELS.index), ids=describe
)
def kernels(request, build_kernels):
    """The best level and the portable one, on which every test runs."""
    return loaded(request.param, build_kernels)


@pytest.fixture(scope="session", params=LEVELS[1:-1], ids=describe)
def kernels_between(request, build_kernels):
    """The levels between those two."""
    return loaded(request.param, build_kernels)


@pytest.fixture(autouse=True)
def one_thread():
    """On small tensors handing work to others takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
