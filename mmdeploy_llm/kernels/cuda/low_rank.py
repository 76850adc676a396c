"""The low-rank changes of adapters, in two launches; a program computes for one row.

    x [T, k] --a of the row's slot, scale--> hidden [T, C] --b of the slot--> out [T, n]

Shapes: T tokens, C = P * r columns of a, of all parts; see kernels.low_rank.Change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from mmdeploy_llm.kernels.low_rank import Change

COLUMNS = 64  # of out that a program computes
DEPTH = 64  # values of x that are loaded at once


@triton.jit
def _hidden(
    x_ptr, x_stride, a_ptr, scales_ptr, slots_ptr, hidden_ptr, k,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    columns = tl.arange(0, WIDTH)
    sums = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        depth = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + depth, mask=depth < k, other=0.0).to(tl.float32)
        place = a_ptr + (slot * WIDTH + columns[:, None]) * k + depth[None, :]
        a = tl.load(place, mask=(depth < k)[None, :], other=0.0).to(tl.float32)
        sums += tl.sum(a * x[None, :], axis=1)
    scales = tl.load(scales_ptr + slot * WIDTH + columns)
    tl.store(hidden_ptr + row * WIDTH + columns, sums * scales)


@triton.jit
def _add(
    out_ptr, out_stride, hidden_ptr, b_ptr, first_ptr, factor_ptr, shift_ptr, slots_ptr, n,
    WIDTH: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < n
    ranks = tl.arange(0, RANK)
    first = tl.load(first_ptr + columns, mask=is_in, other=0)
    inner = tl.load(hidden_ptr + row * WIDTH + first[:, None] + ranks[None, :])
    place = b_ptr + (slot * n + columns[:, None]) * RANK + ranks[None, :]
    b = tl.load(place, mask=is_in[:, None], other=0.0).to(tl.float32)
    to = out_ptr + row * out_stride + columns
    value = tl.load(to, mask=is_in, other=0.0).to(tl.float32) + tl.sum(inner * b, axis=1)
    value *= tl.load(factor_ptr + slot * n + columns, mask=is_in, other=1.0)
    value += tl.load(shift_ptr + slot * n + columns, mask=is_in, other=0.0)
    tl.store(to, value.to(out_ptr.dtype.element_ty), mask=is_in)


class Table:
    """The changes of one matrix; implements kernels.low_rank.LowRankTable. Its tensors grow with
    the largest rank, a power of two."""

    def __init__(
        self,
        num_slots: int,
        starts: Sequence[int],
        k: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._starts, self._num_parts, n = tuple(starts), len(starts) - 1, starts[-1]
        self._used = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)
        self._factor = torch.ones(num_slots, n, device=device)
        self._shift = torch.zeros(num_slots, n, device=device)
        self._a = torch.zeros(num_slots, self._width(1), k, dtype=dtype, device=device)
        self._b = torch.zeros(num_slots, n, 1, dtype=dtype, device=device)
        self._scales = torch.zeros(num_slots, self._width(1), device=device)
        self._first = self._firsts(1)

    def _width(self, rank: int) -> int:
        return int(triton.next_power_of_2(self._num_parts * rank))

    def _firsts(self, rank: int) -> Tensor:
        """Returns the first column of a of each column of out, [n]."""
        sizes = [end - start for start, end in pairwise(self._starts)]
        parts = torch.arange(self._num_parts, dtype=torch.int32) * rank
        return parts.repeat_interleave(torch.tensor(sizes)).to(self._b.device)

    def put(self, slot: int, change: Change | None) -> None:
        self._used[slot] = change is not None
        if change is None:
            return
        rank = change.b.shape[1]
        if rank > self._b.shape[2]:
            self._grow(triton.next_power_of_2(rank))
        assert change.starts == self._starts
        size = self._b.shape[2]
        a = change.a.view(self._num_parts, rank, -1)
        a = F.pad(a, (0, 0, 0, size - rank)).flatten(0, 1)
        self._a[slot, : len(a)] = a.to(self._a)
        self._b[slot] = F.pad(change.b, (0, size - rank)).to(self._b)
        scales = torch.tensor(change.scales).repeat_interleave(size)
        self._scales[slot, : len(scales)] = scales.to(self._scales)
        self._factor[slot] = 1.0 if change.factor is None else change.factor.to(self._factor)
        self._shift[slot] = 0.0 if change.shift is None else change.shift.to(self._shift)

    def _grow(self, rank: int) -> None:
        """Makes room for changes of `rank`, a power of two."""
        old, count = self._b.shape[2], self._num_parts
        a = self._a[:, : count * old].unflatten(1, (count, old))
        a = F.pad(a, (0, 0, 0, rank - old)).flatten(1, 2)
        scales = self._scales[:, : count * old : old].repeat_interleave(rank, 1)
        more = self._width(rank) - count * rank
        self._a = F.pad(a, (0, 0, 0, more)).contiguous()
        self._scales = F.pad(scales, (0, more)).contiguous()
        self._b = F.pad(self._b, (0, rank - old)).contiguous()
        self._first = self._firsts(rank)

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        num_slots, width, k = self._a.shape
        known = torch.where((slots >= 0) & (slots < num_slots), slots, num_slots)
        slots = torch.where(self._used[known], slots, -1)
        hidden = torch.empty(x.shape[0], width, device=x.device)
        grid = (x.shape[0],)
        _hidden[grid](
            x, x.stride(0), self._a, self._scales, slots, hidden, k, WIDTH=width, BLOCK=DEPTH
        )
        n, rank = self._b.shape[1:]
        _add[(x.shape[0], triton.cdiv(n, COLUMNS))](
            out, out.stride(0), hidden, self._b, self._first, self._factor, self._shift, slots, n,
            WIDTH=width, RANK=rank, BLOCK=COLUMNS,
        )  # fmt: skip
