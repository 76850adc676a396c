"""Which backend attends: by name, or the best one for the device that is installed."""

from __future__ import annotations

import importlib.util

from mmdeploy_llm.config import AttentionChoice
from mmdeploy_llm.errors import ConfigError

from .base import AttentionBackend
from .flash import BLOCK_MULTIPLE, FlashAttention
from .reference import ReferenceAttention

BACKENDS = ("flash-attn", "reference")
DEFAULT_BLOCK_SIZE = 64


def select(name: str, device: str, dtype: str, block_size: int | None) -> AttentionChoice:
    """The backend for `device` and `dtype`; block_size None lets it choose. Raises ConfigError."""
    if name == "auto":
        name = "flash-attn" if _can_flash(device, dtype) else "reference"
    if name not in BACKENDS:
        raise ConfigError(
            f"attention_backend = {name!r} is not known; use auto, {', '.join(BACKENDS)}"
        )
    if name == "flash-attn":
        return AttentionChoice(name=name, block_size=_flash_block_size(device, dtype, block_size))
    return AttentionChoice(name=name, block_size=block_size or DEFAULT_BLOCK_SIZE)


def create(choice: AttentionChoice) -> AttentionBackend:
    """The backend that was chosen. Raises ConfigError when what it needs is not installed."""
    return FlashAttention() if choice.name == "flash-attn" else ReferenceAttention()


def _can_flash(device: str, dtype: str) -> bool:
    is_fit = device.startswith("cuda") and dtype in ("bfloat16", "float16")
    return is_fit and importlib.util.find_spec("flash_attn") is not None


def _flash_block_size(device: str, dtype: str, block_size: int | None) -> int:
    if not device.startswith("cuda") or dtype == "float32":
        raise ConfigError(
            f"attention_backend = 'flash-attn' needs a CUDA device and bfloat16 or float16, "
            f"got device = {device!r} and dtype = {dtype!r}; use attention_backend='reference'"
        )
    if block_size is not None and block_size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"block_size = {block_size} does not suit flash-attn 2; "
            f"use a multiple of {BLOCK_MULTIPLE}"
        )
    return block_size or BLOCK_MULTIPLE
