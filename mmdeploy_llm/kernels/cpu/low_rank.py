"""Low-rank changes of adapters, see low_rank.h."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.low_rank import Change

from .library import Library

BLOCK = 16  # as in dot.h
PANEL = 64  # as in low_rank.h
NUM_FIELDS = 7  # of LowRankEntry


class Table:
    """The changes of one matrix; implements kernels.low_rank.LowRankTable."""

    def __init__(
        self,
        products: LowRankProducts,
        num_slots: int,
        starts: Sequence[int],
        k: int,
        dtype: torch.dtype,
    ) -> None:
        self._products, self._k, self._dtype = products, k, dtype
        self._starts, self._n = torch.tensor(starts), starts[-1]
        self._entries = torch.zeros(num_slots, NUM_FIELDS, dtype=torch.int64)
        self._kept: dict[int, Sequence[Tensor | None]] = {}

    def put(self, slot: int, change: Change | None) -> None:
        self._entries[slot] = 0
        self._kept.pop(slot, None)
        if change is None:
            return
        starts = self._starts.tolist()
        assert list(change.starts) == starts
        assert change.a.shape[1] == self._k
        unit = 4 // self._dtype.itemsize
        a, rank = _packed_a(change.a.to(self._dtype), change.b.shape[1], unit)
        b = _packed_b(change.b.to(self._dtype), starts, unit)
        scales = torch.tensor(change.scales, dtype=torch.float32)
        extra = [x if x is None else x.float().contiguous() for x in (change.factor, change.shift)]
        tensors = (a, b, scales, *extra)
        self._kept[slot] = tensors
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        self._entries[slot] = torch.tensor([*addresses, rank, a.shape[1]])

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        self._products.add_low_rank(out, x, slots, self._entries, self._starts)

    def arguments(self) -> Structure:
        """Returns the arguments of the call that `add` makes, but for what differs between steps;
        they are good as long as the table lives."""
        empty = self._products._empty
        out, x = (empty((1, size), dtype=self._dtype) for size in (self._n, self._k))
        slots = empty((1,), dtype=torch.int32)
        ((_, args),) = self._products.captured(lambda: self.add(out, x, slots))
        return args


class LowRankProducts(Library):
    """Makes tables of low-rank changes."""

    def low_rank_table(
        self, num_slots: int, starts: Sequence[int], k: int, dtype: torch.dtype
    ) -> Table | None:
        """See kernels.low_rank.LowRankKernels."""
        fits = dtype in (torch.float32, torch.bfloat16) and k % 2 == 0
        return Table(self, num_slots, starts, k, dtype) if fits else None

    def add_low_rank(
        self, out: Tensor, x: Tensor, slots: Tensor, entries: Tensor, starts: Tensor
    ) -> None:
        """Changes `out` in place; see LowRankTable.add. entries: as LowRankEntry has them."""
        assert slots.dtype is torch.int32
        assert slots.is_contiguous()
        self._library.low_rank(
            dtype=x.dtype,
            x=x,
            x_stride=x.stride(0),
            out=out,
            out_stride=out.stride(0),
            slots=slots,
            table=entries,
            num_slots=entries.shape[0],
            starts=starts,
            parts=starts.shape[0] - 1,
            rows=x.shape[0],
            n=out.shape[1],
            k=x.shape[1],
        )


def _packed_a(a: Tensor, rank: int, unit: int) -> tuple[Tensor, int]:
    """Returns a [P * rank, k] as [k / unit, columns, unit], and the columns of a part in it."""
    even = rank + rank % 2
    rows = F.pad(a.view(-1, rank, a.shape[1]), (0, 0, 0, even - rank)).flatten(0, 1)
    rows = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
    return rows.view(len(rows), -1, unit).permute(1, 0, 2).contiguous(), even


def _packed_b(b: Tensor, starts: Sequence[int], unit: int) -> Tensor:
    """Returns b [n, r] in panels of the columns of out, [r / unit, columns, unit] each."""
    even = F.pad(b, (0, b.shape[1] % 2))
    panels = []
    for start, end in pairwise(starts):
        for rows in torch.split(even[start:end], PANEL):
            whole = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK))
            panels.append(whole.view(len(whole), -1, unit).permute(1, 0, 2).flatten())
    return torch.cat(panels)
