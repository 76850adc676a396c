"""The machine is read once, and its kernels are loaded in one place."""

import re
from pathlib import Path

import pytest

from mmdeploy_llm.engine.startup import machine as module
from mmdeploy_llm.engine.startup.cards import Card, CudaSetup
from mmdeploy_llm.engine.startup.machine import read_machine
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import TORCH, cuda
from mmdeploy_llm.kernels import cpu as native
from mmdeploy_llm.values.options.config import EngineConfig

PACKAGE = Path(module.__file__).parents[2]
CARD = Card(name="card", capability=(9, 0), total_bytes=1)
CUDA = CudaSetup(torch="2", cuda=(12, 8), driver=(12, 8), architectures=("sm_90",), cards=(CARD,))


class Named(str):
    """The name of kernels, in their place."""

    is_compiled, can_place_threads = True, False
    cpu_level = None


@pytest.fixture
def loads(monkeypatch):
    """Records the names of kernels that would be loaded, instead of loading them."""
    monkeypatch.setattr(
        native,
        "load",
        lambda level=None, fixed_order=False, formats=None: Named(
            "fixed" if fixed_order else "cpu kernels"
        ),
    )
    monkeypatch.setattr(
        cuda,
        "load",
        lambda device, rounder=None: Named(
            " ".join(filter(None, (device.type, rounder or "kernels")))
        ),
    )
    monkeypatch.setattr(module, "read_cuda", lambda: CUDA)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"device": "cpu"}, "cpu kernels"),
        ({"device": "cpu", "deterministic": True}, "fixed"),
        ({"device": "cpu", "native_kernels": False}, TORCH),
        ({"device": "auto"}, "cuda kernels"),
        ({"device": "cuda:0"}, "cuda kernels"),
        ({"device": "cuda", "native_kernels": False}, TORCH),
        ({"device": "cuda", "quantization": "int4"}, "cuda cpu kernels"),  # these round
    ],
)
def test_kernels_by_device(loads, options, found):
    assert read_machine(EngineConfig(model="m", **options)).kernels == found


def test_without_a_card_auto_is_the_cpu(loads, monkeypatch, caplog):
    monkeypatch.setattr(module, "read_cuda", lambda: CudaSetup(torch="2", cuda=(12, 8)))
    assert read_machine(EngineConfig(model="m")).kernels == "cpu kernels"
    assert not caplog.text
    old = CudaSetup(torch="2", cuda=(12, 8), driver=(11, 4))
    monkeypatch.setattr(module, "read_cuda", lambda: old)
    read_machine(EngineConfig(model="m"))
    assert "'auto' is the CPU: the NVIDIA driver runs CUDA up to 11.4" in caplog.text


def test_without_a_compiler_plain_torch_computes_and_says_so(loads, monkeypatch, caplog):
    def fail(level, fixed_order, formats):
        raise native.BuildError("no compiler")

    monkeypatch.setattr(native, "load", fail)
    assert read_machine(EngineConfig(model="m", device="cpu")).kernels is TORCH
    assert "no C++ kernels, plain torch computes the same more slowly: no compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"quantization = 'int8' needs the C\+\+ kernels"):
        read_machine(EngineConfig(model="m", device="cpu", quantization="int8"))
    with pytest.raises(ConfigError, match=r"deterministic = True needs the C\+\+ kernels"):
        read_machine(EngineConfig(model="m", device="cpu", deterministic=True))


def test_options_of_the_cpu_are_refused_on_a_card(loads):
    with pytest.raises(
        ConfigError, match=r"native_kernels = True needs .* the device is not a CPU"
    ):
        read_machine(EngineConfig(model="m", device="cuda", native_kernels=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"native_kernels": False}, "native_kernels is False"),
        ({"deterministic": True}, "deterministic = True needs .* the device is not a CPU"),
    ],
)
def test_options_that_do_not_go_with_rounded_weights_on_a_card(loads, options, reason):
    with pytest.raises(ConfigError, match=reason):
        read_machine(EngineConfig(model="m", device="cuda", quantization="wint4", **options))


def test_rounding_on_a_card_needs_both_kinds_of_kernels(loads, monkeypatch):
    config = EngineConfig(model="m", device="cuda", quantization="int8")
    monkeypatch.setattr(cuda, "load", lambda device, rounder: None)
    with pytest.raises(ConfigError, match="quantization = 'int8' needs Triton on CUDA"):
        read_machine(config)

    def fail(formats):
        raise native.BuildError("no compiler")

    monkeypatch.setattr(native, "load", fail)
    with pytest.raises(ConfigError, match=r"the C\+\+ kernels, which round .* but no compiler"):
        read_machine(config)


@pytest.mark.full
def test_kernels_have_one_caller():
    """Besides start-up only the benchmark, the doctor and the kit load kernels, to measure and to
    examine the machine and plugins without an engine, and what rounds weights for a file as the
    engine does."""
    loading = re.compile(r"\b(?:native|cuda)\.load\(|(?<!def )\bload_kernels\(")
    callers = {path for path in PACKAGE.rglob("*.py") if loading.search(path.read_text())}
    names = ("engine/startup/machine.py", "cli/bench/run.py", "cli/doctor/examination.py")
    names += ("checkpoints/quantize/calibrate.py", "checkpoints/saving/loaded.py")
    names += ("testing/attention/subject.py", "testing/weights/products.py")
    assert callers == {PACKAGE / name for name in names}
