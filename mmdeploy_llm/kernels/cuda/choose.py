"""Chooses the next token of every row of logits on the device: launches the kernels of
choose_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from . import choose_kernels as kernels

OK, NOT_FINITE, NOTHING_ALLOWED = range(3)  # outcomes of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The state of each slot on the device; M slots.

    ints, reals: [M, 8] int64 and [M, 8] float64; choose_kernels.py names the columns.
    edit_ids, edit_values: [M, E] int32 and float32; the values are added to the logits of the ids.
    counts: [M, V] int16, 0 for a token that is not in the request, else 1 + how often it was
        generated; [1] while no request has penalties.
    """

    ints: Tensor
    reals: Tensor
    edit_ids: Tensor
    edit_values: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How rows are split. block: tokens of a tile. candidates: most candidates stored of a tile.
    together: values that the program of a row processes at once."""

    block: int = 4096
    candidates: int = 128
    together: int = 8192


def choose(
    logits: Tensor,
    slots: Tensor,
    rules: Rules,
    *,
    weighs: bool = True,
    forced: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Returns token ids and outcomes (OK, NOT_FINITE or NOTHING_ALLOWED) of all rows, [2, N] int64
    on the device, and appends the tokens to the slots.

    logits: [N, V] floats. slots: [N], all different. weighs: whether a row may be drawn without
    top_k and min_p, which needs the mass of the whole vocabulary. forced: [N] int64, the token of a
    row; -1: choose one.
    """
    tiling = tiling or Tiling()
    num_rows, vocab_size = logits.shape
    num_tiles = triton.cdiv(vocab_size, tiling.block)
    new = logits.new_empty
    raw_peaks, peaks, limits = new((3, num_rows, num_tiles), dtype=torch.float32)
    peak_ids, num_kept = new((2, num_rows, num_tiles), dtype=torch.int32)
    kept = new((num_rows, num_tiles, tiling.candidates), dtype=torch.float32)
    kept_ids = torch.empty_like(kept, dtype=torch.int32)
    masses = new((num_rows, num_tiles), dtype=torch.int64)
    out = new((2, num_rows), dtype=torch.int64)
    packed = (
        rules.ints, rules.reals, rules.edit_ids, rules.edit_values, rules.counts,
    )  # fmt: skip
    has_table, max_edits = int(rules.counts.dim() == 2), rules.edit_ids.shape[1]
    common = logits, logits.stride(0), slots, packed, max_edits, has_table, vocab_size, num_tiles
    found = raw_peaks, peaks, peak_ids, limits, num_kept, kept, kept_ids
    grid = num_rows, num_tiles
    sizes = {"BLOCK": tiling.block, "C": tiling.candidates}
    kernels.survey[grid](*common, *found, **sizes, num_warps=16)
    tiles = triton.next_power_of_2(num_tiles)
    if weighs:
        kernels.weigh[grid](*common, peaks, masses, BLOCK=tiling.block, TILES=tiles, num_warps=8)
    kernels.choose[(num_rows,)](
        *common, num_rows, slots if forced is None else forced, *found, masses, out,
        HAS_FORCED=forced is not None, **sizes, TILES=tiles, TILE=tiling.together, num_warps=16,
    )  # fmt: skip
    return out
