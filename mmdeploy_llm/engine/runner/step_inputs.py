"""The inputs of a step: arrays on the host, tensors on the device, and DecodeFrame, the tensors at
fixed addresses that a recorded decode step reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmdeploy_llm.hooks.objects.attention import NO_SLOT, BatchLayout
from mmdeploy_llm.layers.attention.layouts import decode_layout
from mmdeploy_llm.layers.transfer import Array, BufferSlice, buffer_slices, staging_buffer


class Paging(NamedTuple):
    """The places of a step's keys and values, on the host."""

    block_tables: Array  # [B, M] int32
    slots: Array  # [T] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The inputs of a step on the host: T tokens, B sequences, M blocks in the longest block
    table."""

    token_ids: Array  # [T] int64
    positions: Array  # [T] or [axes, T] int64
    in_prompt: Array  # [T] bool
    query_lens: Array  # [B] int64
    context_lens: Array  # [B] int64
    pagings: tuple[Paging, ...]  # of layers without a window, then of those with one, if any
    is_long: Array | None = None  # [T] bool; see forward.ForwardInputs


class StepTensors(NamedTuple):
    """The inputs of a step on the device; see forward.ForwardInputs."""

    token_ids: Tensor
    positions: Tensor
    in_prompt: Tensor
    layout: BatchLayout
    is_long: Tensor | None = None


class DecodeFrame:
    """The inputs of a recorded decode step: tensors at fixed addresses on the device, for up to
    num_seqs sequences with block tables of up to num_blocks. `fill` is their only writer.

    Rows after those of the batch are padding, as hooks/objects/attention.py requires of CUDA
    graphs.
    """

    def __init__(
        self,
        *,
        num_seqs: int,
        num_blocks: int,
        max_context: int,
        num_axes: int,
        device: torch.device,
        has_windows: bool = False,
        has_long: bool = False,
    ) -> None:
        self.num_seqs, self.num_blocks = num_seqs, num_blocks
        self._has_windows = has_windows
        shape = (num_axes, num_seqs) if num_axes else (num_seqs,)
        self._fixed = [
            ((num_seqs,), torch.int64),
            (shape, torch.int64),
            ((num_seqs,), torch.int32),
            ((num_seqs,), torch.bool),
            *[((num_seqs,), torch.int64)] * (1 + has_windows),
            *[((num_seqs,), torch.bool)] * has_long,
        ]
        slices = self._layout(num_blocks)
        self._buffer = torch.zeros(slices[-1].end, dtype=torch.uint8, device=device)
        token_ids, positions, context_lens, in_prompt, *slots = (
            own.view(self._buffer) for own in slices[: len(self._fixed)]
        )
        is_long = slots.pop() if has_long else None
        for own in slots:
            own.fill_(NO_SLOT)
        context_lens.fill_(1)
        self._tables = [
            torch.zeros((num_seqs, num_blocks), dtype=torch.int32, device=device) for _ in slots
        ]
        self.tensors = StepTensors(
            token_ids=token_ids,
            positions=positions,
            in_prompt=in_prompt,
            layout=decode_layout(
                block_tables=self._tables[0],
                slots=slots[0],
                context_lens=context_lens,
                max_context=max_context,
                windows=(self._tables[1], slots[1]) if has_windows else None,
            ),
            is_long=is_long,
        )

    def _layout(self, width: int) -> list[BufferSlice]:
        """Returns where the inputs are in the buffer, with block tables of this width at its
        end."""
        table = ((self.num_seqs, width), torch.int32)
        return buffer_slices([*self._fixed, *[table] * (1 + self._has_windows)])

    def fits(self, arrays: StepArrays) -> bool:
        """Whether each sequence computes one token and the frame has the capacity for them all."""
        num_tokens = len(arrays.token_ids)
        num_seqs, num_blocks = arrays.pagings[0].block_tables.shape
        fits = num_tokens == num_seqs <= self.num_seqs and num_blocks <= self.num_blocks
        return bool(fits)

    def fill(self, arrays: StepArrays) -> StepTensors:
        """Writes a step's inputs and padding into the frame's tensors: one copy to the device, then
        one within it into each block table. Only the tables' columns in use are transferred."""
        assert self.fits(arrays), "the caller chooses a frame that fits"
        count, width = arrays.pagings[0].block_tables.shape
        slices = self._layout(width)
        staging = staging_buffer(slices[-1].end, self._buffer.device)
        rows = (
            (arrays.token_ids, 0),
            (arrays.positions, 0),
            (arrays.context_lens, 1),
            (arrays.in_prompt, 0),
            *((paging.slots, NO_SLOT) for paging in arrays.pagings),
            *(() if arrays.is_long is None else ((arrays.is_long, 0),)),
        )
        num_rows = len(rows)
        for own, (array, padding) in zip(slices[:num_rows], rows, strict=True):
            values = own.view(staging).numpy()
            values[..., :count], values[..., count:] = array, padding
        for own, paging in zip(slices[num_rows:], arrays.pagings, strict=True):
            values = own.view(staging).numpy()
            values[:count], values[count:] = paging.block_tables, 0
        self._buffer[: slices[-1].end].copy_(staging, non_blocking=True)
        for table, own in zip(self._tables, slices[num_rows:], strict=True):
            table[:, :width].copy_(own.view(self._buffer))
        return self.tensors
