"""The kernels for the instruction sets of this processor."""

import pytest
import torch

from mmdeploy_llm.kernels.cpu import BuildError, CpuKernels, Level, cpu_levels

LEVELS = cpu_levels()  # best first, PORTABLE last
BEST = LEVELS[0]
ALL_CASES = BEST, Level.AVX2, Level.PORTABLE
# The 256-bit vpdpbusd of AVX-VNNI has the same semantics in AVX-512 VL, which more machines have.
VNNI_OF_AVX512 = ("-mavx512vl", "-mavx512vnni", "-DMM_VECTOR_BYTES=32")


def loaded(build_kernels, level, flags=()):
    try:
        return CpuKernels(build_kernels(level, flags=flags))
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


def describe(level):
    return "best" if level is BEST else level.value


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(level, marks=[pytest.mark.full] * (level is not BEST), id=describe(level))
        for level in LEVELS
        if level in ALL_CASES
    ],
)
def kernels(request, build_kernels):
    """The best level, which quick tests use, AVX2 and the portable one."""
    return loaded(build_kernels, request.param)


def other_levels():
    levels = {level.value: (level, ()) for level in LEVELS if level not in ALL_CASES}
    if Level.AVX512_VNNI in LEVELS and Level.AVX2_VNNI not in LEVELS:
        levels["avx2_vnni"] = Level.AVX2, VNNI_OF_AVX512
    return levels


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(found, marks=pytest.mark.long, id=name)  # each compiles for half a minute
        for name, found in other_levels().items()
    ],
)
def kernels_of_level(request, build_kernels):
    """Every other level, for one case of each kernel."""
    return loaded(build_kernels, *request.param)


@pytest.fixture(autouse=True)
def one_thread():
    """On small tensors handing work to others takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
