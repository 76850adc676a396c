"""Errors that are raised before anything is loaded, on simulated machines."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from mmdeploy_llm.engine.startup.cards import (
    Card,
    CudaSetup,
    check_device,
    check_memory,
    driver_version,
    missing_cuda,
    read_cuda,
)
from mmdeploy_llm.errors import ConfigError

GIB = 2**30
T4 = Card(name="Tesla T4", capability=(7, 5), total_bytes=15 * GIB)
P100 = Card(name="Tesla P100", capability=(6, 0), total_bytes=16 * GIB)
A100 = Card(name="A100", capability=(8, 0), total_bytes=80 * GIB)
L40 = Card(name="L40", capability=(8, 9), total_bytes=48 * GIB)
H200 = Card(name="H200", capability=(9, 0), total_bytes=141 * GIB)
WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


def setup(*cards, **values):
    found = {"torch": "2.11.0", "cuda": (12, 8), "driver": (12, 8), "architectures": WHEEL}
    return CudaSetup(**{**found, "cards": cards, **values})


NO_DEVICE = [
    (setup(cuda=None, driver=None), "torch 2.11.0 was built without CUDA; install a CUDA build"),
    (setup(driver=None), "CUDA 12.8 and needs an NVIDIA driver, which is missing"),
    (setup(driver=(11, 4)), r"driver runs CUDA up to 11\.4 and .* CUDA 12\.8; update the driver"),
    (setup(error="No CUDA GPUs are available"), r"no card .*\(No CUDA GPUs are available\)"),
]


@pytest.mark.parametrize(("found", "text"), NO_DEVICE)
def test_what_is_missing_is_named(found, text):
    with pytest.raises(ConfigError, match=text):
        check_device("cuda", "bfloat16", found)


@pytest.mark.parametrize("card", [A100, L40, H200])
def test_a_card_that_suits(card):
    assert missing_cuda(setup(card)) is None
    check_device("cuda", "bfloat16", setup(card))
    check_device("cuda:1", "float32", setup(T4, card))


def test_an_older_driver_of_the_same_generation_suits():
    check_device("cuda", "bfloat16", setup(A100, driver=(12, 2)))


def test_the_cpu_needs_no_card():
    check_device("cpu", "bfloat16", setup(cuda=None))


def test_too_few_cards_are_named():
    with pytest.raises(ConfigError, match=r"'cuda:3', but there is only cuda:0 \(A100\), cuda:1"):
        check_device("cuda:3", "bfloat16", setup(A100, A100))
    with pytest.raises(ConfigError, match=r"and 3 more, .* or lower tensor_parallel_size"):
        check_device("cuda", "bfloat16", setup(A100, A100), num_cards=4)
    check_device("cuda", "bfloat16", setup(A100, A100), num_cards=2)


def test_no_number():
    with pytest.raises(ConfigError, match="'cuda:one' is not known"):
        check_device("cuda:one", "bfloat16", setup(A100))


@pytest.mark.parametrize(
    ("card", "dtype", "text"),
    [
        (T4, "bfloat16", r"Tesla T4\) has compute capability 7\.5, but bfloat16 needs 8\.0; use "
         "dtype='float16'"),
        (P100, "bfloat16", r"needs 8\.0; use dtype='float32'"),
        (P100, "float16", r"float16 needs 7\.0; use dtype='float32'"),
    ],
)  # fmt: skip
def test_a_dtype_that_the_card_does_not_support(card, dtype, text):
    with pytest.raises(ConfigError, match=text):
        check_device("cuda", dtype, setup(card, architectures=("sm_60", *WHEEL)))
    check_device("cuda", "float32", setup(card, architectures=("sm_60", *WHEEL)))


@pytest.mark.parametrize(
    ("architectures", "runs"),
    [
        (("sm_80",), False),  # an earlier generation
        (("sm_100",), False),  # a later one
        (("sm_90",), True),
        (("sm_90a",), True),
        (("sm_100a",), False),
        (("compute_80",), True),  # compiled when it is loaded
        (("compute_100",), False),
        (("strange",), False),
    ],
)
def test_what_torch_was_built_for(architectures, runs):
    found = setup(H200, architectures=architectures)
    if runs:
        check_device("cuda", "bfloat16", found)
        return
    with pytest.raises(ConfigError, match=f"was built for {architectures[0]}; install"):
        check_device("cuda", "bfloat16", found)


def test_weights_that_do_not_fit_raise_with_both_sizes():
    sizes = {"device": "cuda", "least_cache": GIB // 4, "total": 24 * GIB, "utilization": 0.9}
    check_memory(weights=15 * GIB, free=24 * GIB, **sizes)
    text = (
        r"24\.00 GiB, of which 8\.00 are in use and gpu_memory_utilization = 0\.9 allows 13\.60 "
        r"more; the weights need 15\.00 and the smallest KV cache 0\.25"
    )
    with pytest.raises(ConfigError, match=text):
        check_memory(weights=15 * GIB, free=16 * GIB, **sizes)


def test_a_torch_without_cuda():
    library = SimpleNamespace(__version__="2.11.0+cpu", version=SimpleNamespace(cuda=None))
    assert read_cuda(library) == CudaSetup(torch="2.11.0+cpu")


def library(*, cards, error=None):
    def init():
        if error:
            raise RuntimeError(error)

    properties = [
        SimpleNamespace(
            name=card.name,
            major=card.capability[0],
            minor=card.capability[1],
            total_memory=card.total_bytes,
        )
        for card in cards
    ]
    return SimpleNamespace(
        __version__="2.11.0",
        version=SimpleNamespace(cuda="12.8"),
        cuda=SimpleNamespace(
            init=init,
            device_count=lambda: len(cards),
            get_device_properties=lambda index: properties[index],
            get_arch_list=lambda: list(WHEEL),
        ),
    )


def test_facts_of_a_machine_with_cards():
    found = read_cuda(library(cards=[H200, T4]), lambda: 13000)
    assert found == setup(H200, T4, driver=(13, 0))


def test_facts_of_a_machine_that_torch_cannot_use():
    made_up = library(cards=[], error="Found no NVIDIA driver\non your system")
    found = read_cuda(made_up, lambda: None)
    assert found == setup(driver=None, architectures=(), error="Found no NVIDIA driver")


def test_what_the_driver_says(monkeypatch):
    class Driver:
        def cuDriverGetVersion(self, place):
            place._obj.value = 13020
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert driver_version() == 13020


def test_no_driver(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert driver_version() is None


def test_cards_can_be_queried_with_every_build_of_torch():
    """The installed build, and the answers of a CUDA build on a machine without a card."""
    found = read_cuda()
    assert found.torch == torch.__version__
    assert (missing_cuda(found) is None) == torch.cuda.is_available()
