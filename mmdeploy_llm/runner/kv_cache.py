"""The KV cache: how many blocks fit, and their memory. Sizes are in bytes unless the name says
tokens or blocks."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np
import torch

from mmdeploy_llm.attention.base import KVCache
from mmdeploy_llm.errors import ConfigError

CPU_SHARE_OF_FREE_RAM = 0.4  # the rest is for activations, media and other processes
CPU_MOST_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The shape of one block: keys and values of `block_size` tokens in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Keys and values of one block in every layer, with their scales."""
        per_head = self.head_dim * self.dtype.itemsize + self.scale_size
        return 2 * self.num_layers * self.num_kv_heads * per_head * self.block_size

    @property
    def scale_size(self) -> int:
        """Bytes of the scale of one token and head: a float32 for 8-bit caches, otherwise 0."""
        return 4 if self.dtype.itemsize == 1 else 0


def count_blocks(shape: KVCacheShape, memory: int, most_blocks: int) -> int:
    """Returns how many blocks fit into `memory`, at most `most_blocks`, which all concurrent
    requests at full length would use. Raises ConfigError when not even two blocks fit.
    """
    num_blocks = min(memory // shape.bytes_per_block, max(2, most_blocks))
    if num_blocks < 2:
        raise ConfigError(
            f"{memory / 2**20:.1f} MiB for the KV cache hold {num_blocks} blocks of "
            f"{shape.block_size} tokens ({shape.bytes_per_block / 2**20:.2f} MiB each); at least "
            "2 are needed: raise kv_cache_memory, or free memory"
        )
    return num_blocks


def available_memory(device: torch.device, utilization: float) -> int:
    """Bytes the KV cache may take now, after the weights: on CPU a share of free RAM, on CUDA what
    `utilization` of the card leaves.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - utilization) * total))
    return min(CPU_MOST_BYTES, int(CPU_SHARE_OF_FREE_RAM * _free_ram()))


def allocate(shape: KVCacheShape, num_blocks: int, device: torch.device) -> KVCache:
    """Allocates the cache, zeroed: backends need finite values past the end of a sequence.

    On the CPU its pages are zero pages of the system until they are written: a cache of gigabytes
    costs nothing at start, and later only the memory that is used. Raises ConfigError where a GPU
    has not enough memory.
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


def _free_ram() -> int:
    """Returns MemAvailable where the system reports it (Linux), else half of the physical
    memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
