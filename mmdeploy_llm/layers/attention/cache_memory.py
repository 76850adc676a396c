"""Allocates what the layers of a model keep: the KV cache and the states. Sizes are in bytes unless
the name says tokens, blocks or rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from mmdeploy_llm.caches import LayerCache, PagedKV, SharedKV, State, layer_windows
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks.objects.attention import KVCache

from .int4 import INT4, num_groups
from .out_of_memory import is_out_of_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredHead:
    """A tensor of which each head of each token has its own values, of this size and dtype."""

    size: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheShape:
    """The shape of one block, keys and values of block_size tokens in all layers, and of one row of
    states.

    dtype: of keys and values; torch.int4: see int4.py. model_dtype: of states that have the
        model's; None: dtype.
    """

    layers: tuple[LayerCache, ...]
    block_size: int
    dtype: torch.dtype
    model_dtype: torch.dtype | None = None

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> KVCacheShape:
        """Returns the shape of a cache that is the same in all layers."""
        layer = PagedKV(num_kv_heads=num_kv_heads, head_dim=head_dim)
        return cls(layers=(layer,) * num_layers, block_size=block_size, dtype=dtype)

    @property
    def has_integers(self) -> bool:
        """Whether keys and values are stored as integers, whose steps are those of the largest."""
        return not self.dtype.is_floating_point

    @property
    def bytes_per_block(self) -> int:
        """Size of one block in all layers without a window: keys, values and their scales."""
        return self._bytes_of(has_window=False)

    @property
    def bytes_per_window_block(self) -> int:
        """Size of one block in all layers with a window."""
        return self._bytes_of(has_window=True)

    def _bytes_of(self, *, has_window: bool) -> int:
        return sum(
            layer.num_kv_heads * self.block_size * math.prod(stored.size) * stored.dtype.itemsize
            for layer in self.layers
            if isinstance(layer, PagedKV) and (layer.window is not None) is has_window
            for stored in self.stored_heads(layer)
        )

    @property
    def windows(self) -> dict[int, int]:
        """See caches.layer_windows."""
        return layer_windows(self.layers)

    def stored_heads(self, layer: PagedKV) -> tuple[StoredHead, ...]:
        """Returns how a head of a token is stored: key, value, and their scales if it has any."""
        sizes = layer.head_dim, layer.head_dim if layer.value_dim is None else layer.value_dim
        if self.dtype is INT4:
            return _int4_heads(sizes)
        scales = (StoredHead(size=(), dtype=torch.float32),) * 2 * (self.dtype.itemsize == 1)
        return *(StoredHead(size=(size,), dtype=self.dtype) for size in sizes), *scales

    @property
    def bytes_per_state(self) -> int:
        """Size of the states of one sequence in all layers; 0 for a model without states."""
        return sum(
            math.prod(shape) * self.state_dtype(name).itemsize
            for layer in self.layers
            if isinstance(layer, State)
            for shape, name in zip(layer.shapes, layer.dtypes, strict=True)
        )

    def state_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that a caches.State names."""
        found = (self.model_dtype or self.dtype) if name == "model" else getattr(torch, name)
        assert isinstance(found, torch.dtype), f"{name!r} is a dtype of torch"
        return found


def _int4_heads(sizes: tuple[int, int]) -> tuple[StoredHead, ...]:
    """Returns the same for 4 bits. Raises ConfigError for a size that does not fill bytes."""
    for size in sizes:
        if size % 2:
            raise ConfigError(
                f"kv_cache_dtype = 'int4' stores two channels in a byte, but the model has heads "
                f"of {size}; use 'int8', or leave kv_cache_dtype out"
            )
    codes = (StoredHead(size=(size // 2,), dtype=torch.uint8) for size in sizes)
    scales = (StoredHead(size=(num_groups(size), 2), dtype=torch.bfloat16) for size in sizes)
    return *codes, *scales


StateTensors = dict[int, tuple[torch.Tensor, ...]]


def allocate(
    shape: KVCacheShape, num_blocks: int, device: torch.device, num_window_blocks: int = 0
) -> KVCache:
    """Allocates a zeroed cache: rows past a sequence's end are read, and must be finite.
    num_window_blocks: blocks of the layers with a window.

    On a CPU the system provides zeroed pages when they are first written, so that blocks without
    use cost neither time nor memory. Raises ConfigError when a device has too little memory.
    """
    try:
        return _allocated(shape, num_blocks, device, num_window_blocks)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        num_bytes = num_blocks * shape.bytes_per_block
        num_bytes += num_window_blocks * shape.bytes_per_window_block
        raise ConfigError(
            f"{num_blocks} KV cache blocks take {num_bytes / 2**30:.2f} "
            f"GiB, more than {device} has left; lower kv_cache_memory, num_gpu_blocks_override or "
            "gpu_memory_utilization"
        ) from error


def allocate_states(shape: KVCacheShape, num_rows: int, device: torch.device) -> StateTensors:
    """Allocates the states of the layers that keep one, [num_rows, *shape] each, zeroed; by layer.
    Raises ConfigError when a device has too little memory."""
    try:
        return {
            index: tuple(
                _zeros((num_rows, *size), shape.state_dtype(name), device)
                for size, name in zip(layer.shapes, layer.dtypes, strict=True)
            )
            for index, layer in enumerate(shape.layers)
            if isinstance(layer, State)
        }
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"the states of {num_rows} sequences take "
            f"{num_rows * shape.bytes_per_state / 2**30:.2f} GiB, more than {device} has left; "
            "lower max_num_seqs or prefix_cache_memory"
        ) from error


def _allocated(
    shape: KVCacheShape, num_blocks: int, device: torch.device, num_window_blocks: int
) -> KVCache:
    layers: list[_LayerTensors] = []
    nothing = PagedKV(num_kv_heads=0, head_dim=0)
    for layer in shape.layers:
        if isinstance(layer, SharedKV):
            layers.append(layers[layer.layer])
        elif isinstance(layer, State):
            layers.append(_layer_tensors(nothing, shape, 0, device))
        else:
            count = num_blocks if layer.window is None else num_window_blocks
            layers.append(_layer_tensors(layer, shape, count, device))
    if not layers:  # nothing is kept; a cache has at least a block size
        layers.append(_layer_tensors(nothing, shape, 0, device))
    keys, values, *scales = zip(*layers, strict=True)
    if not scales:
        return KVCache(keys=keys, values=values)
    return KVCache(keys=keys, values=values, key_scales=scales[0], value_scales=scales[1])


_LayerTensors = tuple[torch.Tensor, ...]  # keys and values, then their scales if there are any


def _layer_tensors(
    layer: PagedKV, shape: KVCacheShape, num_blocks: int, device: torch.device
) -> _LayerTensors:
    heads = (num_blocks, shape.block_size, layer.num_kv_heads)
    stored = shape.stored_heads(layer)
    return tuple(_zeros((*heads, *each.size), each.dtype, device) for each in stored)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(size)
