"""Allocates the KV cache. Sizes are in bytes unless the name says tokens or blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mmdeploy_llm.attention.base import KVCache
from mmdeploy_llm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The shape of one block: keys and values of block_size tokens in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Size of one block in all layers: keys, values and their scales."""
        per_head = self.head_dim * self.dtype.itemsize + self.scale_size
        return 2 * self.num_layers * self.num_kv_heads * per_head * self.block_size

    @property
    def scale_size(self) -> int:
        """Size of the scale of one token and head: float32 for 8-bit caches, else 0."""
        return 4 if self.dtype.itemsize == 1 else 0


def allocate(shape: KVCacheShape, num_blocks: int, device: torch.device) -> KVCache:
    """Allocates the cache, zeroed: some backends read rows past a sequence's end, which must be
    finite.

    On a CPU the system provides zeroed pages when they are first written, so a cache of gigabytes
    costs no time at start and no memory that is not used. Raises ConfigError when a card has too
    little memory.
    """
    try:
        return _allocated(shape, num_blocks, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{num_blocks} KV cache blocks take {num_blocks * shape.bytes_per_block / 2**30:.2f} "
            f"GiB, more than {device} has left; lower kv_cache_memory, num_gpu_blocks_override or "
            "gpu_memory_utilization"
        ) from error


def _allocated(shape: KVCacheShape, num_blocks: int, device: torch.device) -> KVCache:
    heads = (num_blocks, shape.block_size, shape.num_kv_heads)

    def layers(size: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return tuple(_zeros(size, dtype, device) for _ in range(shape.num_layers))

    rows = (*heads, shape.head_dim)
    keys, values = layers(rows, shape.dtype), layers(rows, shape.dtype)
    if not shape.scale_size:
        return KVCache(keys=keys, values=values)
    scales = layers(heads, torch.float32), layers(heads, torch.float32)
    return KVCache(keys=keys, values=values, key_scales=scales[0], value_scales=scales[1])


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(size)
