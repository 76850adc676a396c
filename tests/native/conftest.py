"""The kernels for the instruction sets of this processor."""

import pytest
import torch

from mmdeploy_llm.native import BuildError, CpuKernels, Level, cpu_levels

LEVELS = cpu_levels()  # best first, PORTABLE last
BEST = LEVELS[0]
# The 256-bit vpdpbusd of AVX-VNNI has the same semantics in AVX-512 VL, which more machines have.
VNNI_OF_AVX512 = ("-mavx512vl", "-mavx512vnni", "-DMM_VECTOR_BYTES=32")


def loaded(build_kernels, level, flags=()):
    try:
        return CpuKernels(build_kernels(level, flags))
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")


def describe(level):
    return "best" if level is BEST else level.value


@pytest.fixture(
    scope="session",
    params=[level for level in LEVELS if level in (BEST, Level.AVX2, Level.PORTABLE)],
    ids=describe,
)
def kernels(request, build_kernels):
    """The best level, AVX2 and the portable one, on which every test runs."""
    return loaded(build_kernels, request.param)


def other_levels():
    levels = {f"level_{level.value}": (level, ()) for level in LEVELS[1:]}
    if Level.AVX512_VNNI in LEVELS and Level.AVX2_VNNI not in LEVELS:
        levels["level_avx2_vnni"] = Level.AVX2, VNNI_OF_AVX512
    return levels


@pytest.fixture(scope="session", params=other_levels().values(), ids=other_levels())
def kernels_of_level(request, build_kernels):
    """Every level but the best one, for one case of each kernel."""
    return loaded(build_kernels, *request.param)


@pytest.fixture(autouse=True)
def one_thread():
    """On small tensors handing work to others takes longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
