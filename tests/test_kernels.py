"""The operations of kernels: CPU and CUDA override the base class, and no caller checks which one
it has."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import mmdeploy_llm.kernels
from mmdeploy_llm.hooks import AttentionKernels, PixelKernels
from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.kernels.coded import CodeLayout

ROW = re.compile(r"^    (\w+) +([x-]) +([x-])$", re.MULTILINE)


@pytest.fixture(params=["torch", "cpu", "cuda"])
def device(request):
    return request.param


@pytest.fixture
def own(device, request):
    """Returns the kernels of the device."""
    if device == "torch":
        return TORCH
    if device == "cpu":
        return request.getfixturevalue("kernels")
    pytest.importorskip("triton", reason="the kernels for CUDA need triton")
    from mmdeploy_llm.kernels.cuda.cuda_kernels import CudaKernels

    return CudaKernels(torch.device("cpu"))


def methods(kind):
    """Returns the public methods of a class by name, those of its bases included."""
    return {
        name: each
        for name, each in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def overridden(kind):
    base = methods(Kernels)
    return {name for name, each in methods(kind).items() if base.get(name, each) is not each}


def test_an_override_has_the_signature_of_the_base_class(own):
    base, found = methods(Kernels), methods(type(own))
    for name in overridden(type(own)):
        wanted = inspect.signature(base[name]).parameters
        assert inspect.signature(found[name]).parameters == wanted, name


def test_every_method_says_what_it_computes():
    assert all(each.__doc__ for each in methods(Kernels).values())


def test_the_table_says_what_each_device_overrides(own, device):
    table = {name: (cpu, cuda) for name, cpu, cuda in ROW.findall(mmdeploy_llm.kernels.__doc__)}
    assert table.keys() == methods(Kernels).keys() - {"takes_whole", "takes_rows"}
    column = {"torch": None, "cpu": 0, "cuda": 1}[device]
    listed = {name for name, marks in table.items() if column is not None and marks[column] == "x"}
    assert overridden(type(own)) == listed


@pytest.mark.parametrize(
    ("name", "contract"), [("attention", AttentionKernels), ("pixels", PixelKernels)]
)
def test_what_others_are_handed_keeps_the_contract_of_hooks(own, name, contract):
    handed = getattr(own, name)
    if handed is None:
        return
    for method, each in methods(contract).items():
        found = inspect.signature(getattr(type(handed), method)).parameters
        assert found == inspect.signature(each).parameters, method


def test_what_is_not_packed_is_none(own, device):
    weight = torch.zeros(3, 5, dtype=torch.float16)
    assert not own.can_pack(weight, None)
    assert own.pack(weight, None) is None
    layout = CodeLayout(bits=4, group_size=64)
    assert own.can_pack_coded(layout, (8, 128)) is own.is_compiled
    assert own.can_pack_coded(layout, (2, 8, 128)) is (device == "cpu")
    floats = CodeLayout(bits=8, group_size=64, is_float8=True)
    assert own.can_pack_coded(floats, (8, 128)) is own.is_compiled
    assert not own.can_pack_coded(CodeLayout(bits=4, group_size=40), (8, 128))


def test_record_returns_the_result(own):
    out, recording = own.record(torch.add, torch.ones(2, 8), torch.ones(2, 8))
    assert torch.equal(out, torch.full((2, 8), 2.0))
    assert recording is None  # torch's own operations are not recorded


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tensors_without_a_kernel_are_left_to_torch(own, device, dtype):
    """An override hands them on, so that no layer asks first."""
    if device == "cuda":
        dtype = torch.float64  # it has kernels for float16
    x, weight, gate = torch.randn(3, 8, dtype=dtype), torch.ones(8, dtype=dtype), torch.randn(3, 1)
    tables = torch.randn(2, 3, 4)
    calls = {
        "activate": (x, "gelu"),
        "gated_mul": (x, x, "silu"),
        "silu_mul": (x, x),
        "clamped_mul": (x, 1.7, 7.0),
        "softcap": (x, 30.0),
        "scale": (x, 2.0),
        "add_rows": (x.clone(), x, gate.to(dtype)),
        "gate_heads": (x.view(3, 2, 4), x.view(3, 2, 4)),
        "widen": (x,),
        "rms_norm": (x, weight, 1e-6, x.clone()),
        "layer_norm": (x, weight, None, 1e-6),
        "norm_heads": (x.view(3, 1, 8), weight, 1e-6),
        "normed_heads": (x, 1e-6),
        "add_norm": (x, weight, 1e-6, x.clone()),
        "look_up": (x, torch.tensor([2, 0])),
    }
    for name, given in calls.items():
        fresh = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
        expected = getattr(TORCH, name)(*fresh)
        assert torch.equal(getattr(own, name)(*given), expected), name
    heads = x.view(3, 1, 8)
    rotated = TORCH.rotate(heads.clone(), *tables, is_interleaved=True)
    assert torch.equal(own.rotate(heads, *tables, is_interleaved=True), rotated)


def test_nobody_asks_which_kernels_they_are():
    core = Path(__file__).parent.parent / "mmdeploy_llm"
    asking = [
        path
        for path in core.rglob("*.py")
        if re.search(r"isinstance\([^)]*(Cpu|Cuda)?Kernels\b", path.read_text(encoding="utf-8"))
    ]
    assert not asking
