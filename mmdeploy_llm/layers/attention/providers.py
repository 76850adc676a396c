"""Builds the backends that plugin `attention` declares, and says why one cannot be used here."""

from __future__ import annotations

from functools import partial

from mmdeploy_llm.hooks.objects.attention import AttentionBackend, AttentionSetup

from . import libraries
from .writing import CacheWriter, write_by_kernel, write_plain

NARROW = 128  # channels of a head
NARROW_FROM = (10, 0)  # compute capability from which flash-attn 4 has no kernels for wider heads
MIN_FOR_FLOAT8 = (8, 9)  # compute capability with instructions for 8-bit floats


def _library_problem(name: str, setup: AttentionSetup) -> str | None:
    """Returns what is missing of the library that a backend calls; None if nothing is."""
    return libraries.problem(name)


flash_2_problem = partial(_library_problem, "flash-attn")
flash_3_problem = partial(_library_problem, "flash-attn-3")
torch_varlen_problem = partial(_library_problem, "torch-varlen")


def flash_4_problem(setup: AttentionSetup) -> str | None:
    """See AttentionBackendSpec.available."""
    is_new = setup.capability is not None and setup.capability >= NARROW_FROM
    wide = [size for size in setup.head_dims if size > NARROW]
    if is_new and wide:
        return (
            f"cannot compute heads of {wide[0]} channels on such a card, which the model has "
            f"(multiples of 8 up to {NARROW})"
        )
    return libraries.problem("flash-attn-4")


def triton_problem(setup: AttentionSetup) -> str | None:
    """See AttentionBackendSpec.available."""
    found = setup.capability
    if setup.kv_cache_dtype == "float8_e4m3fn" and found is not None and found < MIN_FOR_FLOAT8:
        return (
            f"needs compute capability 8.9 for kv_cache_dtype = 'fp8', but {setup.device} has "
            f"{found[0]}.{found[1]}; use 'int8'"
        )
    return libraries.problem("triton")


def native_problem(setup: AttentionSetup) -> str | None:
    """See AttentionBackendSpec.available."""
    if setup.kernels is None:
        return "needs the C++ kernels, which are not available"
    return None


def _writer() -> CacheWriter:
    """Our Triton kernels write the cache if triton is installed, which comes with torch for
    CUDA."""
    return write_by_kernel if libraries.is_installed("triton") else write_plain


def new_flash_2(setup: AttentionSetup) -> AttentionBackend:
    """Builds flash-attn."""
    from .flash import FlashAttention

    return FlashAttention(_writer())


def new_flash_3(setup: AttentionSetup) -> AttentionBackend:
    """Builds flash-attn-3."""
    from .flash3 import FlashAttention3

    return FlashAttention3(_writer())


def new_flash_4(setup: AttentionSetup) -> AttentionBackend:
    """Builds flash-attn-4, whose decode our Triton kernels compute."""
    from .flash4 import FlashAttention4
    from .triton_paged import TritonAttention

    has_triton = libraries.is_installed("triton")
    return FlashAttention4(_writer(), TritonAttention(setup.device) if has_triton else None)


def new_torch_varlen(setup: AttentionSetup) -> AttentionBackend:
    """Builds torch-varlen."""
    from .torch_varlen import TorchVarlenAttention

    return TorchVarlenAttention(_writer())


def new_triton(setup: AttentionSetup) -> AttentionBackend:
    """Builds triton."""
    from .triton_paged import TritonAttention

    return TritonAttention(setup.device)


def new_native(setup: AttentionSetup) -> AttentionBackend:
    """Builds native."""
    from .native import NativeAttention

    assert setup.kernels is not None, "native_problem requires kernels"
    return NativeAttention(setup.kernels)


def new_reference(setup: AttentionSetup) -> AttentionBackend:
    """Builds reference."""
    from .reference import ReferenceAttention

    return ReferenceAttention()
