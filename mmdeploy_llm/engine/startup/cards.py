"""Finds the CUDA cards and checks whether one can run a model, before anything is loaded.

torch --read_cuda--> CudaSetup --> missing_cuda    why no card can be used at all
                               --> check_device    this device exists and computes in this dtype
     meta model, free memory   --> check_memory    weights and the smallest KV cache fit
"""

from __future__ import annotations

import ctypes
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mmdeploy_llm.errors import ConfigError

# The lowest compute capability with arithmetic in the dtype; lower ones emulate it or fail.
MIN_CAPABILITY = {"bfloat16": (8, 0), "float16": (7, 0)}
ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One CUDA card. capability: its compute capability (major, minor). total_bytes: size of its
    memory."""

    name: str
    capability: tuple[int, int]
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSetup:
    """The CUDA cards and versions that torch finds on this machine.

    torch: its version. cuda: the CUDA version torch was built with, None for a build without CUDA.
    driver: the newest CUDA version the driver supports, None without a driver.
    architectures: those torch was built for, such as "sm_90".
    error: torch's message when it could not initialise CUDA.
    """

    torch: str
    cuda: tuple[int, int] | None = None
    driver: tuple[int, int] | None = None
    architectures: tuple[str, ...] = ()
    cards: tuple[Card, ...] = ()
    error: str | None = None


def driver_version() -> int | None:
    """Returns the newest CUDA version the NVIDIA driver supports (12080 is 12.8), None without a
    driver. Queries the driver itself, since some versions of torch do not report it."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    found = ctypes.c_int()
    return found.value if driver.cuDriverGetVersion(ctypes.byref(found)) == 0 else None


def read_cuda(
    library: Any = torch, ask_driver: Callable[[], int | None] = driver_version
) -> CudaSetup:
    """Asks torch without allocating memory on a card. library: torch, or a double of it."""
    if library.version.cuda is None:
        return CudaSetup(torch=library.__version__)
    cards: tuple[Card, ...] = ()
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # our own message says what torch would warn about
        try:
            library.cuda.init()
            cards = tuple(_card(library, index) for index in range(library.cuda.device_count()))
        except (RuntimeError, AssertionError) as found:
            error = str(found).strip().partition("\n")[0]
    number = ask_driver()
    major, minor = (int(part) for part in library.version.cuda.split(".")[:2])
    return CudaSetup(
        torch=library.__version__,
        cuda=(major, minor),
        driver=(number // 1000, number % 1000 // 10) if number else None,
        architectures=tuple(library.cuda.get_arch_list()) if cards else (),
        cards=cards,
        error=error,
    )


def _card(library: Any, index: int) -> Card:
    found = library.cuda.get_device_properties(index)
    return Card(
        name=found.name, capability=(found.major, found.minor), total_bytes=found.total_memory
    )


def missing_cuda(setup: CudaSetup) -> str | None:
    """Returns why no CUDA device can be used and what to do about it; None when one can."""
    if setup.cards:
        return None
    if setup.cuda is None:
        return (
            f"torch {setup.torch} was built without CUDA; install a CUDA build of torch "
            "(pytorch.org/get-started), or use device='cpu'"
        )
    needed = f"torch {setup.torch} was built with CUDA {_dotted(setup.cuda)}"
    if setup.driver is None:
        return (
            f"{needed} and needs an NVIDIA driver, which is missing; install it (in a "
            "container: start it with access to the cards), or use device='cpu'"
        )
    if setup.driver[0] < setup.cuda[0]:
        return (
            f"the NVIDIA driver runs CUDA up to {_dotted(setup.driver)} and {needed}; update the "
            f"driver, or install a torch built with CUDA {setup.driver[0]}"
        )
    detail = f" ({setup.error})" if setup.error else ""
    return (
        f"torch finds no card that it can use{detail}; check what nvidia-smi shows and what "
        "CUDA_VISIBLE_DEVICES hides, or use device='cpu'"
    )


def check_device(device: str, dtype: str, setup: CudaSetup, num_cards: int = 1) -> None:
    """Raises ConfigError unless `device` and the num_cards - 1 cards after it exist and compute in
    `dtype`. Devices other than CUDA pass."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return
    found = missing_cuda(setup)
    if found:
        raise ConfigError(f"device = {device!r}, but {found}")
    if number and not number.isdecimal():
        raise ConfigError(f"device = {device!r} is not known; use cuda, or cuda:0, cuda:1, ...")
    first = int(number or 0)
    if first + num_cards > len(setup.cards):
        named = ", ".join(f"cuda:{at} ({card.name})" for at, card in enumerate(setup.cards))
        more = f" and {num_cards - 1} more" if num_cards > 1 else ""
        raise ConfigError(
            f"device = {device!r}{more}, but there is only {named}; use one of these"
            + (", or lower tensor_parallel_size or data_parallel_size" if more else "")
        )
    for index in range(first, first + num_cards):
        _check_card(f"cuda:{index}", setup.cards[index], dtype, setup)


def _check_card(device: str, card: Card, dtype: str, setup: CudaSetup) -> None:
    named = f"{device} ({card.name}) has compute capability {_dotted(card.capability)}"
    if not any(_runs(name, card.capability) for name in setup.architectures):
        raise ConfigError(
            f"{named}, but torch {setup.torch} was built for {', '.join(setup.architectures)}; "
            "install a torch that was built for this card, or use another device"
        )
    required = MIN_CAPABILITY.get(dtype, (0, 0))
    if card.capability < required:
        other = "float16" if card.capability >= MIN_CAPABILITY["float16"] else "float32"
        raise ConfigError(f"{named}, but {dtype} needs {_dotted(required)}; use dtype={other!r}")


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Returns whether code built for `architecture` runs on a card of this capability: machine code
    ("sm") on later cards of its generation, with "a" on exactly its own; code that the driver
    compiles ("compute") on all later cards."""
    found = ARCHITECTURE.fullmatch(architecture)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    if found[4] == "a":
        return built == capability
    if found[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def check_memory(
    *,
    device: str,
    weights: int,
    least_cache: int,
    free: int,
    total: int,
    utilization: float,
) -> None:
    """Raises ConfigError unless the weights and the smallest KV cache fit into the share
    `utilization` of the card's memory, less what other programs use. All sizes in bytes."""
    usable = free - (1 - utilization) * total
    if weights + least_cache <= usable:
        return
    others = total - free
    raise ConfigError(
        f"{device} has {_gib(total)} GiB, of which {_gib(others)} are in use and "
        f"gpu_memory_utilization = {utilization:g} allows {_gib(max(usable, 0))} more; the weights "
        f"need {_gib(weights)} and the smallest KV cache {_gib(least_cache)}: use a smaller model "
        "or dtype, a larger card, several of them (tensor_parallel_size), "
        "or free memory that other programs use"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
