"""Selects the attention backend: by name, or the best installed one for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.native import MAX_HEAD_DIM
from mmdeploy_llm.runtime_config import AttentionChoice, AttentionNeeds

from . import libraries
from .base import AttentionBackend
from .flash import BLOCK_MULTIPLE, FlashAttention
from .flash3 import FlashAttention3
from .flash4 import TMA_BLOCK_SIZE, FlashAttention4
from .native import NativeAttention
from .reference import ReferenceAttention
from .torch_varlen import TorchVarlenAttention
from .triton_paged import TritonAttention
from .varlen import VarlenBackend
from .writing import CacheWriter, write_by_kernel, write_plain

DEFAULT_BLOCK_SIZE = 64
HALF_DTYPES = ("bfloat16", "float16")
FLOAT8 = "float8_e4m3fn"
QUANTIZED = ("int8", "int4", FLOAT8)  # dtypes of the KV cache that no model computes in
NARROW = 128  # channels of a head
MIN_FOR_FLOAT8 = (8, 9)  # compute capability with instructions for 8-bit floats

Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a backend on CUDA.

    lowest, below: the lowest compute capability, and the first that is too new; None: no bound.
    max_head_dim: head sizes are multiples of 8 up to this.
    narrow_from: compute capability from which head sizes are at most NARROW; None: never.
    cache_dtypes: dtypes of the KV cache other than the model's.
    block_multiple: block sizes are multiples of this. block_size: the default.
    """

    dtypes: tuple[str, ...] = HALF_DTYPES
    lowest: Capability = (8, 0)
    below: Capability | None = None
    max_head_dim: int = 256
    narrow_from: Capability | None = None
    cache_dtypes: tuple[str, ...] = ()
    block_multiple: int = 1
    block_size: int = DEFAULT_BLOCK_SIZE


LIMITS: Mapping[str, Limits] = MappingProxyType(
    {
        # Both accept 8-bit keys only together with 8-bit queries, and our queries have 16 bits.
        "flash-attn-3": Limits(lowest=(9, 0), below=(10, 0), block_size=TMA_BLOCK_SIZE),
        "flash-attn-4": Limits(
            lowest=(9, 0), below=(12, 0), narrow_from=(10, 0), block_size=TMA_BLOCK_SIZE
        ),
        "flash-attn": Limits(block_multiple=BLOCK_MULTIPLE, block_size=BLOCK_MULTIPLE),
        "torch-varlen": Limits(block_multiple=BLOCK_MULTIPLE, block_size=BLOCK_MULTIPLE),
        "triton": Limits(dtypes=(*HALF_DTYPES, "float32"), lowest=(7, 0), cache_dtypes=QUANTIZED),
    }
)
# The order of "auto" on CUDA. flash-attn 3 is made for Hopper, prefill and decode; 4 is as good at
# prefill on Hopper, but our kernels compute its decode. flash-attn 2 comes before torch's copy of
# it, which has no softcap. Our Triton kernels come last, because the others were tuned for years;
# they alone support float32, caches of few bits, other block sizes and old cards.
CUDA_ORDER = ("flash-attn-3", "flash-attn-4", "flash-attn", "torch-varlen", "triton")
BACKENDS = (*CUDA_ORDER, "native", "reference")
NATIVE_DTYPES = ("bfloat16", "float32")
LIBRARY_BACKENDS: Mapping[str, type[VarlenBackend]] = MappingProxyType(
    {
        "flash-attn": FlashAttention,
        "flash-attn-3": FlashAttention3,
        "flash-attn-4": FlashAttention4,
        "torch-varlen": TorchVarlenAttention,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """Machine and model, as the choice of a backend needs them; see `select`."""

    has_kernels: bool
    capabilities: tuple[Capability, ...]
    head_dim: int | None
    is_installed: Callable[[str], bool]

    def capability(self, device: str) -> Capability | None:
        """Returns the compute capability of "cuda" or "cuda:1"; None if it is not known."""
        index = int(device.partition(":")[2] or 0)
        return self.capabilities[index] if index < len(self.capabilities) else None


def select(
    needs: AttentionNeeds,
    *,
    has_kernels: bool,
    capabilities: Sequence[Capability] = (),
    head_dim: int | None = None,
    is_installed: Callable[[str], bool] = libraries.is_installed,
) -> AttentionChoice:
    """Selects the backend for `needs`. Raises ConfigError when the named one does not support them.

    has_kernels: whether there are kernels with attention on the CPU (Kernels.attention).
    capabilities: compute capability of each CUDA device.
    head_dim: channels of a head; None if they are not known yet.
    is_installed: whether a backend's library is installed.
    """
    host = _Host(
        has_kernels=has_kernels,
        capabilities=tuple(capabilities),
        head_dim=head_dim,
        is_installed=is_installed,
    )
    name = _best(needs, host) if needs.name == "auto" else needs.name
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend = {name!r} is not known; use auto, {', '.join(BACKENDS)}"
        )
    problem = _problem(name, needs, host)
    if problem:
        raise ConfigError(f"attention_backend = {name!r} {problem}")
    limits = LIMITS.get(name, Limits())
    size = limits.block_size if needs.block_size is None else needs.block_size
    if size % limits.block_multiple:
        raise ConfigError(
            f"block_size = {size} does not suit attention_backend = {name!r}; use a multiple of "
            f"{limits.block_multiple}, or attention_backend='triton', which takes any"
        )
    return AttentionChoice(name=name, block_size=size)


def with_sinks(
    name: str, *, asked: str, is_installed: Callable[[str], bool] = libraries.is_installed
) -> str:
    """Returns the backend of a model with attention sinks: `name`, which was chosen before the
    model was built, or one that takes the same blocks where its library has no sinks. Raises
    ConfigError when `asked`, the option, names such a library."""
    library = LIBRARY_BACKENDS.get(name)
    if library is None or library.has_sinks:
        return name
    if asked != "auto":
        raise ConfigError(
            f"attention_backend = {asked!r} cannot compute attention sinks, which the model has; "
            "use 'auto', 'triton' or 'reference'"
        )
    return "triton" if is_installed("triton") else "reference"


def check_installed(name: str) -> None:
    """Raises ConfigError when the backend's library cannot be imported or is too old. Called before
    the model is loaded; `create` would raise it only afterwards."""
    if name in LIMITS:
        libraries.load(name)


def create(
    choice: AttentionChoice,
    kernels: Kernels | None,
    head_dims: Sequence[int],
    device: torch.device | None = None,
) -> AttentionBackend:
    """Builds the chosen backend for `device` (None: the current CUDA device). kernels: CPU kernels,
    for the backend "native". head_dims: channels of the heads, of all layers. Raises ConfigError
    when its library is not installed, or when it cannot compute one of these sizes."""
    for head_dim in head_dims:
        problem = _head_problem(choice.name, head_dim)
        if problem:
            raise ConfigError(f"attention_backend = {choice.name!r} {problem}")
    if choice.name == "reference":
        return ReferenceAttention()
    if choice.name == "native":
        assert kernels is not None, "select() requires kernels"
        assert kernels.attention is not None, "select() requires their attention"
        return NativeAttention(kernels.attention)
    device = device or torch.device("cuda")
    if choice.name == "triton":
        return TritonAttention(device)
    return _library_backend(choice.name, device)


def _library_backend(name: str, device: torch.device) -> VarlenBackend:
    """Builds a backend that calls a library. Our Triton kernels write its cache if triton is
    installed, which comes with torch for CUDA."""
    has_triton = libraries.is_installed("triton")
    write: CacheWriter = write_by_kernel if has_triton else write_plain
    if name == "flash-attn-4":
        decode = TritonAttention(device) if has_triton else None
        return FlashAttention4(write, decode)
    return LIBRARY_BACKENDS[name](write)


def _best(needs: AttentionNeeds, host: _Host) -> str:
    """Returns the first backend for the device that supports `needs`."""
    if not needs.device.startswith("cuda"):
        return "reference" if _problem("native", needs, host) else "native"
    for name in CUDA_ORDER:
        multiple = LIMITS[name].block_multiple
        suits = needs.block_size is None or needs.block_size % multiple == 0
        if suits and _problem(name, needs, host) is None and host.is_installed(name):
            return name
    # Only our Triton kernels support few bits: their error says what is missing.
    return "triton" if needs.kv_cache_dtype in QUANTIZED else "reference"


def _problem(name: str, needs: AttentionNeeds, host: _Host) -> str | None:
    """Returns why the backend does not support `needs`; None if it does."""
    if name == "reference":
        return _cache_problem(needs, ("int4",)) if needs.kv_cache_dtype in QUANTIZED else None
    if name == "native":
        return _native_problem(needs, host.has_kernels)
    limits = LIMITS[name]
    if not needs.device.startswith("cuda") or needs.dtype not in limits.dtypes:
        return (
            f"needs a CUDA device and {' or '.join(limits.dtypes)}, got device = "
            f"{needs.device!r} and dtype = {needs.dtype!r}; use attention_backend='auto'"
        )
    found = host.capability(needs.device)
    return (
        _capability_problem(limits, needs, found)
        or _head_problem(name, host.head_dim, found)
        or _cache_problem(needs, limits.cache_dtypes)
    )


def _capability_problem(
    limits: Limits, needs: AttentionNeeds, found: Capability | None
) -> str | None:
    if found is None:
        return None
    has = f"{needs.device} has {found[0]}.{found[1]}"
    if found < limits.lowest:
        lowest = f"{limits.lowest[0]}.{limits.lowest[1]}"
        return f"needs compute capability {lowest}, but {has}; use attention_backend='auto'"
    if limits.below is not None and found >= limits.below:
        below = f"{limits.below[0]}.{limits.below[1]}"
        return (
            f"does not support compute capability {below}, but {has}; use attention_backend='auto'"
        )
    if needs.kv_cache_dtype == FLOAT8 and found < MIN_FOR_FLOAT8:
        return f"needs compute capability 8.9 for kv_cache_dtype = 'fp8', but {has}; use 'int8'"
    return None


def _head_problem(name: str, head_dim: int | None, found: Capability | None = None) -> str | None:
    if head_dim is None or name == "reference":
        return None
    upper, step = (MAX_HEAD_DIM, 2) if name == "native" else (LIMITS[name].max_head_dim, 8)
    narrow_from = None if name == "native" else LIMITS[name].narrow_from
    if narrow_from is not None and found is not None and found >= narrow_from:
        upper = NARROW
    if head_dim <= upper and head_dim % step == 0:
        return None
    return (
        f"cannot compute heads of {head_dim} channels, which the model has (multiples of {step} up "
        f"to {upper}); use attention_backend='reference'"
    )


def _native_problem(needs: AttentionNeeds, has_kernels: bool) -> str | None:
    if needs.device != "cpu" or needs.dtype not in NATIVE_DTYPES:
        return (
            f"needs a CPU and bfloat16 or float32, got device = {needs.device!r} and dtype = "
            f"{needs.dtype!r}; use attention_backend='auto'"
        )
    if not has_kernels:
        return "needs the C++ kernels, which are not available; use attention_backend='auto'"
    return _cache_problem(needs, ("int8", "int4"))


def _cache_problem(needs: AttentionNeeds, others: tuple[str, ...]) -> str | None:
    """Returns the problem if the KV cache has neither the model's dtype nor one of `others`; None
    if it has one of these."""
    wanted = needs.kv_cache_dtype
    if wanted == needs.dtype or wanted in others:
        return None
    if wanted in QUANTIZED:
        name = "fp8" if wanted == FLOAT8 else wanted
        where = {
            "int8": "attention_backend='triton' on a GPU, or the C++ kernels on a CPU",
            "int4": "attention_backend='triton' on a GPU, or 'reference'",
            FLOAT8: "attention_backend='triton' on a GPU",
        }[wanted]
        return (
            f"does not support kv_cache_dtype = {name!r}: use {where}, or leave kv_cache_dtype out"
        )
    return (
        f"needs kv_cache_dtype = dtype, got {wanted!r}, {needs.dtype!r}; "
        "use attention_backend='reference'"
    )
