"""The inputs of a step: arrays on the host, tensors on the device, and DecodeFrame, the tensors at
fixed addresses that a recorded decode step reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmdeploy_llm.attention.base import NO_SLOT, BatchLayout
from mmdeploy_llm.attention.layouts import decode_layout
from mmdeploy_llm.transfer import Array, buffer_slices, staging_buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The inputs of a step on the host: T tokens, B sequences, M blocks in the longest block
    table."""

    token_ids: Array  # [T] int64
    positions: Array  # [T] or [3, T] int64
    in_prompt: Array  # [T] bool
    slots: Array  # [T] int64
    block_tables: Array  # [B, M] int32
    query_lens: Array  # [B] int64
    context_lens: Array  # [B] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """The inputs of a step on the device; see forward.ForwardInputs."""

    token_ids: Tensor
    positions: Tensor
    in_prompt: Tensor
    layout: BatchLayout


class DecodeFrame:
    """The inputs of a recorded decode step: tensors at fixed addresses on the device, for up to
    num_seqs sequences with block tables of up to num_blocks. `fill` is their only writer.

    Rows after those of the batch are padding, as attention/base.py requires of CUDA graphs.
    """

    def __init__(
        self,
        *,
        num_seqs: int,
        num_blocks: int,
        max_context: int,
        has_mrope: bool,
        device: torch.device,
    ) -> None:
        self.num_seqs, self.num_blocks = num_seqs, num_blocks
        shape = (3, num_seqs) if has_mrope else (num_seqs,)
        self._slices = buffer_slices(
            [
                ((num_seqs,), torch.int64),
                (shape, torch.int64),
                ((num_seqs,), torch.int64),
                ((num_seqs,), torch.int32),
                ((num_seqs,), torch.bool),
                ((num_seqs, num_blocks), torch.int32),
            ]
        )
        self._buffer = torch.zeros(self._slices[-1].end, dtype=torch.uint8, device=device)
        token_ids, positions, slots, context_lens, in_prompt, _ = (
            own.view(self._buffer) for own in self._slices
        )
        slots.fill_(NO_SLOT)
        context_lens.fill_(1)
        self._tables = torch.zeros((num_seqs, num_blocks), dtype=torch.int32, device=device)
        self.tensors = StepTensors(
            token_ids=token_ids,
            positions=positions,
            in_prompt=in_prompt,
            layout=decode_layout(
                block_tables=self._tables,
                slots=slots,
                context_lens=context_lens,
                max_context=max_context,
            ),
        )

    def fits(self, arrays: StepArrays) -> bool:
        """Whether each sequence computes one token and the frame has the capacity for them all."""
        num_tokens, (num_seqs, num_blocks) = len(arrays.token_ids), arrays.block_tables.shape
        fits = num_tokens == num_seqs <= self.num_seqs and num_blocks <= self.num_blocks
        return bool(fits)

    def fill(self, arrays: StepArrays) -> StepTensors:
        """Writes a step's inputs and padding into the frame's tensors: one copy to the device, then
        one within it into the block tables. Only the tables' columns in use are transferred."""
        assert self.fits(arrays), "the caller chooses a frame that fits"
        count, width = arrays.block_tables.shape
        *fixed, last = self._slices
        tables = replace(last, shape=(self.num_seqs, width))
        staging = staging_buffer(tables.end, self._buffer.device)
        contents = (
            (arrays.token_ids, 0),
            (arrays.positions, 0),
            (arrays.slots, NO_SLOT),
            (arrays.context_lens, 1),
            (arrays.in_prompt, 0),
            (arrays.block_tables, 0),
        )
        for own, (array, padding) in zip([*fixed, tables], contents, strict=True):
            rows = own.view(staging).numpy()
            if own is tables:
                rows[:count], rows[count:] = array, padding
            else:
                rows[..., :count], rows[..., count:] = array, padding
        self._buffer[: tables.end].copy_(staging, non_blocking=True)
        self._tables[:, :width].copy_(tables.view(self._buffer))
        return self.tensors
