"""The interface of kernels: CPU and CUDA implement all of it, and no caller checks which one it
has."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from mmdeploy_llm.hooks import AttentionKernels, PixelKernels
from mmdeploy_llm.kernels import (
    ActivationKernels,
    DrawKernels,
    ExpertKernels,
    InputKernels,
    Kernels,
    ThreadKernels,
    WeightMemory,
)
from mmdeploy_llm.kernels.coded import CodeLayout
from mmdeploy_llm.kernels.low_rank import LowRankKernels
from mmdeploy_llm.kernels.mixtures import MixtureKernels
from mmdeploy_llm.kernels.states import NormKernels, StateKernels

CAPABILITIES = {
    "adapters": LowRankKernels,
    "memory": WeightMemory,
    "inputs": InputKernels,
    "attention": AttentionKernels,
    "experts": ExpertKernels,
    "activations": ActivationKernels,
    "norms": NormKernels,
    "states": StateKernels,
    "draws": DrawKernels,
    "pixels": PixelKernels,
    "threads": ThreadKernels,
    "mixtures": MixtureKernels,
}
OFFERED = {
    "cpu": {
        "adapters",
        "memory",
        "inputs",
        "attention",
        "activations",
        "norms",
        "states",
        "draws",
        "pixels",
        "threads",
        "mixtures",
    },
    "cuda": {"adapters", "experts"},
}


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    return request.param


@pytest.fixture
def own(device, request):
    """Returns the kernels of the device."""
    if device == "cpu":
        return request.getfixturevalue("kernels")
    pytest.importorskip("triton", reason="the kernels for CUDA need triton")
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    return CudaKernels(torch.device("cpu"))


def methods(protocol):
    return {name: each for name, each in vars(protocol).items() if _is_public_method(name, each)}


def _is_public_method(name, member):
    return inspect.isfunction(member) and not name.startswith("_")


def assert_implements(implementation, protocol):
    for name, method in methods(protocol).items():
        found = inspect.signature(getattr(type(implementation), name)).parameters
        assert found == inspect.signature(method).parameters, name


def test_every_method_has_the_signature_of_the_interface(own):
    assert len(methods(Kernels)) == 10
    assert_implements(own, Kernels)
    assert isinstance(own.samples_on_device, bool)


def test_a_capability_is_implemented_or_none(own, device):
    properties = {name for name, each in vars(Kernels).items() if isinstance(each, property)}
    assert properties == CAPABILITIES.keys()
    for name, protocol in CAPABILITIES.items():
        capability = getattr(own, name)
        assert (capability is not None) == (name in OFFERED[device]), name
        if capability is not None:
            assert methods(protocol)
            assert_implements(capability, protocol)


def test_what_is_not_packed_is_none(own):
    weight = torch.zeros(3, 5, dtype=torch.float16)
    assert not own.can_pack(weight, None)
    assert own.pack(weight, None) is None
    layout, is_cpu = CodeLayout(bits=4, group_size=64), own.memory is not None
    assert own.can_pack_coded(layout, (8, 128))
    assert own.can_pack_coded(layout, (2, 8, 128)) == is_cpu
    assert own.can_pack_coded(CodeLayout(bits=8, group_size=64, is_float8=True), (8, 128))
    assert not own.can_pack_coded(CodeLayout(bits=4, group_size=40), (8, 128))


def test_record_returns_the_result(own):
    out, recording = own.record(torch.add, torch.ones(2, 8), torch.ones(2, 8))
    assert torch.equal(out, torch.full((2, 8), 2.0))
    assert recording is None  # torch's own operations are not recorded


def test_nobody_asks_which_kernels_they_are():
    core = Path(__file__).parent.parent / "mmdeploy_llm"
    asking = [
        path
        for path in core.rglob("*.py")
        if re.search(r"isinstance\([^)]*(Cpu|Cuda)?Kernels\b", path.read_text(encoding="utf-8"))
    ]
    assert not asking
