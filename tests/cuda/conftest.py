"""Kernels on the device at hand: a GPU, or the CPU in Triton's interpreter."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernels(triton_device):
    from mmdeploy_llm.cuda.kernels import CudaKernels

    return CudaKernels(triton_device)


@pytest.fixture(scope="session")
def dtypes(triton_device):
    """The interpreter cuts bfloat16 off instead of rounding."""
    few = torch.float32, torch.float16
    return (*few, torch.bfloat16) if triton_device.type == "cuda" else few


@pytest.fixture
def assert_near():
    """Values of one rounding apart."""

    def check(found, expected):
        assert found.dtype is expected.dtype
        limit = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}[found.dtype]
        torch.testing.assert_close(found.float(), expected.float(), atol=limit, rtol=limit)

    return check
