"""Which backend attends: by name, or the best one for the device that is installed."""

from __future__ import annotations

import importlib.util

from mmdeploy_llm.config import AttentionChoice, AttentionNeeds
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.native import MAX_HEAD_DIM, Kernels

from .base import AttentionBackend
from .flash import BLOCK_MULTIPLE, FlashAttention
from .native import NativeAttention
from .reference import ReferenceAttention

BACKENDS = ("flash-attn", "native", "reference")
DEFAULT_BLOCK_SIZE = 64
HALF_DTYPES = ("bfloat16", "float16")
NATIVE_DTYPES = ("bfloat16", "float32")


def select(needs: AttentionNeeds, *, has_kernels: bool) -> AttentionChoice:
    """The backend for what is needed; has_kernels: the CPU kernels are there. Raises
    ConfigError."""
    name = _best(needs, has_kernels) if needs.name == "auto" else needs.name
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend = {name!r} is not known; use auto, {', '.join(BACKENDS)}"
        )
    problem = _problem(name, needs, has_kernels)
    if problem:
        raise ConfigError(
            f"attention_backend = {name!r} {problem}; use attention_backend='reference'"
        )
    if needs.kv_cache_dtype == "int8" and name != "native":
        raise ConfigError(
            f"kv_cache_dtype = 'int8' needs the C++ kernels on a CPU, got the attention backend "
            f"{name!r}; leave kv_cache_dtype out"
        )
    if name == "flash-attn":
        return AttentionChoice(name=name, block_size=_flash_block_size(needs.block_size))
    return AttentionChoice(name=name, block_size=needs.block_size or DEFAULT_BLOCK_SIZE)


def create(choice: AttentionChoice, kernels: Kernels | None, head_dim: int) -> AttentionBackend:
    """The backend that was chosen. Raises ConfigError when what it needs is not installed, or when
    it cannot compute heads of head_dim channels."""
    if choice.name == "flash-attn":
        return FlashAttention()
    if choice.name == "reference":
        return ReferenceAttention()
    assert kernels is not None, "select sees to it"
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise ConfigError(
            f"the model's heads have {head_dim} channels, which attention_backend = 'native' "
            f"cannot compute (an even number up to {MAX_HEAD_DIM}); use "
            "attention_backend='reference'"
        )
    return NativeAttention(kernels)


def _best(needs: AttentionNeeds, has_kernels: bool) -> str:
    if _problem("flash-attn", needs, has_kernels) is None and _has_flash():
        return "flash-attn"
    return "reference" if _problem("native", needs, has_kernels) else "native"


def _problem(name: str, needs: AttentionNeeds, has_kernels: bool) -> str | None:
    """Why the backend cannot serve, None when it can."""
    is_cuda = needs.device.startswith("cuda")
    got = f"got device = {needs.device!r} and dtype = {needs.dtype!r}"
    if name == "flash-attn":
        if not is_cuda or needs.dtype not in HALF_DTYPES:
            return f"needs a CUDA device and bfloat16 or float16, {got}"
    elif name == "native":
        if needs.device != "cpu" or needs.dtype not in NATIVE_DTYPES:
            return f"needs a CPU and bfloat16 or float32, {got}"
        if not has_kernels:
            return "needs the C++ kernels, which are not there"
        if needs.kv_cache_dtype == "int8":
            return None
    else:
        return None
    if needs.kv_cache_dtype != needs.dtype:
        return f"needs kv_cache_dtype = dtype, got {needs.kv_cache_dtype!r}, {needs.dtype!r}"
    return None


def _has_flash() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _flash_block_size(block_size: int | None) -> int:
    if block_size is not None and block_size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"block_size = {block_size} does not suit flash-attn 2; "
            f"use a multiple of {BLOCK_MULTIPLE}"
        )
    return block_size or BLOCK_MULTIPLE
