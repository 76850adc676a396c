"""Backends on the device at hand, and a stand-in for CUDA graphs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Uses one thread: the tensors are small, and the tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cases(load_file):
    return load_file("layers/attention/cases.py")


@pytest.fixture(scope="session")
def fakes(load_file):
    return load_file("layers/attention/fakes.py")


@pytest.fixture(scope="session")
def triton_attention(triton_device):
    """Returns our Triton backend. On a CPU its GPU is simulated, small enough for contexts to be
    split."""
    from mmdeploy_llm.layers.attention.triton_paged import TritonAttention

    if triton_device.type == "cuda":
        return TritonAttention(triton_device)
    from mmdeploy_llm.kernels.cuda.paged import Gpu

    return TritonAttention(triton_device, Gpu(num_processors=8, shared_memory=100_000))


class Recording(TorchDispatchMode):
    """A small CUDA graph: kernel launches while it records are stored, and `replay` launches them
    again with the same tensors and host values, writing to the same memory. As in a real capture,
    the host cannot read a value of the device. `kernel` wraps a function that counts as one
    launch."""

    def __init__(self):
        super().__init__()
        self._launches = []
        self._is_inside = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._is_inside:
            return function(*args, **kwargs)
        assert function is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        assert function is not torch.ops.aten.nonzero.default, "waits for the device"
        out = function(*args, **kwargs)
        self._launches.append((function, args, kwargs, out))
        return out

    def kernel(self, function):
        def launched(*args, **kwargs):
            if not torch.utils._python_dispatch._get_current_dispatch_mode():
                return function(*args, **kwargs)
            self._is_inside = True
            out = function(*args, **kwargs)
            self._is_inside = False
            self._launches.append((function, args, kwargs, out))
            return out

        return launched

    def replay(self):
        for function, args, kwargs, out in self._launches:
            again = function(*args, **kwargs)
            for old, new in zip(_tensors(out), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(out):
    found = out if isinstance(out, tuple | list) else (out,)
    return [x for x in found if isinstance(x, torch.Tensor)]


@pytest.fixture
def recording():
    return Recording()
