"""Attention over the paged KV cache in Triton: chooses tile sizes and launches paged_kernels.py.

Shapes: T tokens, B sequences, H query heads, K key heads, D head size, N blocks, P tokens in a
page, M pages in the longest block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import paged_kernels as kernels
from .int4 import half_group

MAX_SPLITS = 64
MIN_DOT = 16  # rows of the smallest matrix product
MIN_SPLIT = 128  # keys in a split; shorter ones cost more than they save


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The properties of a card that determine launch sizes. shared_memory: bytes that a thread
    block may use."""

    num_processors: int
    shared_memory: int


def gpu_of(device: torch.device) -> Gpu:
    """Reads the properties of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return Gpu(num_processors=found["multiprocessor_count"], shared_memory=found["max_shared_mem"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """One layer of the KV cache. keys, values: [N, P, K, D]. key_scales, value_scales: [N, P, K]
    float32 for 8-bit caches, else None. In 4 bits: see layers/attention/int4.py."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences whose tokens attend.

    starts: [B + 1] int32, the first row of each sequence in q, followed by the end of the last.
    context_lens: [B] int32. tables: [B, M] int32.
    max_query, max_context: upper bounds of the lengths.
    first_visible, end_visible: [T] int32, the range of keys of each row of q if media are atomic;
        else None.
    """

    starts: Tensor
    context_lens: Tensor
    tables: Tensor
    max_query: int
    max_context: int
    first_visible: Tensor | None = None
    end_visible: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Options of the attention scores; see forward.AttentionContext."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None


def prefill(
    q: Tensor, out: Tensor, pages: Pages, sequences: Sequences, scores: Scores, gpu: Gpu
) -> None:
    """Writes attention of the sequences' rows of `q` [T, H, D] to the same rows of `out`."""
    group, num_heads = q.shape[1] // pages.keys.shape[2], pages.keys.shape[2]
    tile = _tile(q, 128 * group, pages, gpu)  # the same for short queries: one kernel for all steps
    block_q = max(1, tile.rows // group)
    num_seqs = sequences.context_lens.shape[0]
    max_tokens = min(q.shape[0], num_seqs * sequences.max_query)
    has_ranges = sequences.first_visible is not None
    kernels.prefill_kernel[(max_tokens // block_q + num_seqs, num_heads)](
        q, out, pages.keys, pages.values, pages.key_scales, pages.value_scales, sequences.tables,
        sequences.starts, sequences.context_lens, sequences.first_visible, sequences.end_visible,
        scores.sinks, num_seqs, scores.window or 0, scores.scale, scores.softcap or 0.0,
        q.stride(0), q.stride(1), out.stride(0), pages.keys.stride(1), pages.keys.stride(2),
        sequences.tables.stride(0),
        HAS_WINDOW=scores.window is not None, HAS_RANGES=has_ranges,
        BLOCK_Q=block_q, **_common(q, pages, scores, tile),
    )  # fmt: skip


def decode(
    q: Tensor, out: Tensor, pages: Pages, sequences: Sequences, scores: Scores, gpu: Gpu
) -> None:
    """Writes attention of one token each of B sequences, the first B rows of `q` [.., H, D], to the
    same rows of `out`. Launch sizes depend on max_context alone, so that a captured launch serves
    every context."""
    num_seqs, num_heads = sequences.context_lens.shape[0], pages.keys.shape[2]
    group = q.shape[1] // num_heads
    tile = _tile(q, group, pages, gpu)
    splits = num_splits(num_seqs * num_heads, sequences.max_context, scores.window, gpu)
    partial = log_sums = None
    if splits > 1:
        shape = (num_seqs, q.shape[1], splits)
        partial = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    common = _common(q, pages, scores, tile)
    kernels.decode_kernel[(num_seqs, num_heads, splits)](
        q, out, partial, log_sums, pages.keys, pages.values, pages.key_scales, pages.value_scales,
        sequences.tables, sequences.context_lens, scores.sinks, scores.window or 0, scores.scale,
        scores.softcap or 0.0, q.stride(0), q.stride(1), out.stride(0), pages.keys.stride(1),
        pages.keys.stride(2), sequences.tables.stride(0),
        HAS_WINDOW=scores.window is not None, IS_SPLIT=splits > 1, **common,
    )  # fmt: skip
    if splits > 1:
        kernels.combine_kernel[(num_seqs, q.shape[1])](
            out, partial, log_sums, out.stride(0), splits, D=q.shape[2], MOST=MAX_SPLITS,
            BLOCK_D=common["BLOCK_D"], num_warps=4,
        )  # fmt: skip


def num_splits(num_rows: int, max_context: int, window: int | None, gpu: Gpu) -> int:
    """Returns the number of splits of each context, a power of two: enough for four programs per
    processor, but no split shorter than MIN_SPLIT."""
    longest = max_context if window is None else min(max_context, window)
    wanted = min(4 * gpu.num_processors // num_rows, longest // MIN_SPLIT, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """Tile sizes. rows: queries times heads. columns: keys in one iteration. dims: D, padded to a
    power of two."""

    rows: int
    columns: int
    dims: int
    num_warps: int
    num_stages: int


def _tile(q: Tensor, num_rows: int, pages: Pages, gpu: Gpu) -> _Tile:
    """Chooses tiles that fit the registers, with as many key tiles in flight as the shared memory
    holds. One iteration of the loop loads page numbers and the next one the keys, so that each
    further tile needs two pipeline stages."""
    dims = max(MIN_DOT, triton.next_power_of_2(q.shape[2]))
    row_bytes = dims * q.element_size()
    is_wide = q.dtype is torch.float32  # no tensor cores: larger tiles do not fit the registers
    max_rows = MIN_DOT if is_wide else 128 if row_bytes <= 256 else 64
    group = q.shape[1] // pages.keys.shape[2]
    rows = max(MIN_DOT, triton.next_power_of_2(max(num_rows, group)))
    rows = max(min(rows, max_rows), triton.next_power_of_2(group))
    columns = 64 if row_bytes <= 256 and not is_wide else 32
    # The queries lie in shared memory too; a tile in flight is keys and values.
    num_tiles = (gpu.shared_memory - rows * row_bytes) // (2 * columns * row_bytes)
    return _Tile(
        rows=rows,
        columns=columns,
        dims=dims,
        num_warps=8 if rows >= 128 or is_wide else 4,
        num_stages=5 if num_tiles > 4 else 3 if num_tiles > 1 else 1,
    )


def _common(q: Tensor, pages: Pages, scores: Scores, tile: _Tile) -> dict[str, object]:
    """Returns the constants of the kernels. float32 is multiplied as float32, not in TF32."""
    is_int4 = pages.keys.dtype is torch.uint8
    return {
        "HAS_SCALES": pages.key_scales is not None and not is_int4,
        "HALF": half_group(q.shape[2]) if is_int4 else 0,
        "HAS_SOFTCAP": scores.softcap is not None,
        "HAS_SINKS": scores.sinks is not None,
        "GROUP": q.shape[1] // pages.keys.shape[2],
        "D": q.shape[2],
        "PAGE": pages.keys.shape[1],
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_D": tile.dims,
        "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
