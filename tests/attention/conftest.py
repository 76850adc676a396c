"""Backends on the device at hand, and a stand-in for CUDA graphs."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small tensors; the tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def cases(load_file):
    return load_file("attention/cases.py")


@pytest.fixture(scope="session")
def fakes(load_file):
    return load_file("attention/fakes.py")


@pytest.fixture(scope="session")
def triton_attention(triton_device):
    """Our Triton backend. Its GPU is made up on a CPU, small enough for contexts to be split."""
    from mmdeploy_llm.attention.triton_paged import TritonAttention

    if triton_device.type == "cuda":
        yield TritonAttention(triton_device)
        return
    from triton.runtime import interpreter

    from mmdeploy_llm.cuda.paged import Gpu

    create_dot = interpreter.InterpreterBuilder.create_dot
    convert_float = interpreter._convert_float

    def with_bfloat16(builder, a, b, d, *rest):
        """It multiplies the bits of bfloat16 as if they were integers."""
        return create_dot(builder, _as_float32(a), _as_float32(b), d, *rest)

    def with_carry(source, source_type, target_type, rounding):
        """It forgets the carry where rounding to 8 bits reaches the next power of two."""
        if (str(source_type), str(target_type)) != ("fp32", "fp8e4nv"):
            return convert_float(source, source_type, target_type, rounding)
        return torch.from_numpy(source.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter.InterpreterBuilder.create_dot = with_bfloat16
    interpreter._convert_float = with_carry
    yield TritonAttention(triton_device, Gpu(num_processors=8, shared_memory=100_000))
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = convert_float


def _as_float32(handle):
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    bits = handle.data.astype(np.uint32) << 16
    return TensorHandle(bits.view(np.float32), tl.float32)


class Recording(TorchDispatchMode):
    """A CUDA graph in small: what is launched while it is on is noted, and `replay` launches it
    again with the same tensors, host values and all, writing results to the same memory.

    A value that the host asks of the device fails, as it does in a capture. `kernel` wraps what is
    one launch, whatever it computes with inside.
    """

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
