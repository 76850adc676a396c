"""From the arrays of a step to tensors on its device: on CUDA through one pinned buffer and one
copy that the host does not wait for.

    staged   [ token ids | positions | slots | lengths | .. | block tables ]   pinned, this step's
                |  one copy
    buffer   [ token ids | positions | slots | lengths | .. | block tables ]   on the device
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.attention.base import NO_SLOT, BatchLayout
from mmdeploy_llm.attention.layouts import decode_layout

Array = NDArray[Any]
ALIGNMENT = 16  # bytes; torch views a part of the buffer in its own dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The inputs of a step on the host: T tokens, B sequences, M blocks in the longest table."""

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


def to_device(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays as tensors on the device. On a CPU they share the arrays' memory."""
    if device.type == "cpu":
        return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
    return pack(arrays, device)


def pack(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays in one buffer, sent in one copy; parts of it are the tensors."""
    parts = _parts([(array.shape, _torch_dtype(array.dtype)) for array in arrays])
    staged = _staging(parts[-1].end, device)
    for part, array in zip(parts, arrays, strict=True):
        part.of(staged).numpy()[...] = array
    buffer = staged.to(device, non_blocking=True)
    return tuple(part.of(buffer) for part in parts)


class DecodeFrame:
    """The inputs of a captured decode step: tensors that keep their place on the device, for up to
    num_seqs sequences with block tables of up to num_blocks. `fill` is their only writer.

    Its layout is what base.py says about CUDA graphs: rows behind the batch are padding.
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
        self._parts = _parts(
            [
                ((num_seqs,), torch.int64),
                (shape, torch.int64),
                ((num_seqs,), torch.int64),
                ((num_seqs,), torch.int32),
                ((num_seqs,), torch.bool),
                ((num_seqs, num_blocks), torch.int32),
            ]
        )
        self._buffer = torch.zeros(self._parts[-1].end, dtype=torch.uint8, device=device)
        token_ids, positions, slots, context_lens, in_prompt, _ = (
            part.of(self._buffer) for part in self._parts
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
        """Whether the step is of decode tokens alone, and no larger than the frame."""
        num_tokens, (num_seqs, num_blocks) = len(arrays.token_ids), arrays.block_tables.shape
        fits = num_tokens == num_seqs <= self.num_seqs and num_blocks <= self.num_blocks
        return bool(fits)

    def fill(self, arrays: StepArrays) -> StepTensors:
        """The step's inputs in the frame's tensors: one copy to the device, and one there to the
        block tables, of which only the columns in use are sent."""
        assert self.fits(arrays), "the caller chooses a frame that fits"
        count, width = arrays.block_tables.shape
        *fixed, last = self._parts
        tables = _Part(offset=last.offset, shape=(self.num_seqs, width), dtype=last.dtype)
        staged = _staging(tables.end, self._buffer.device)
        contents = (
            (arrays.token_ids, 0),
            (arrays.positions, 0),
            (arrays.slots, NO_SLOT),
            (arrays.context_lens, 1),
            (arrays.in_prompt, 0),
            (arrays.block_tables, 0),
        )
        for part, (array, padding) in zip([*fixed, tables], contents, strict=True):
            rows = part.of(staged).numpy()
            if part is tables:
                rows[:count], rows[count:] = array, padding
            else:
                rows[..., :count], rows[..., count:] = array, padding
        self._buffer[: tables.end].copy_(staged, non_blocking=True)
        self._tables[:, :width].copy_(tables.of(self._buffer))
        return self.tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor inside a buffer of bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor in this buffer, without a copy."""
        return buffer[self.offset : self.end].view(self.dtype).view(self.shape)


def _parts(wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[_Part]:
    """One behind the other, each where torch may view it."""
    parts, offset = [], 0
    for shape, dtype in wanted:
        part = _Part(offset=offset, shape=shape, dtype=dtype)
        parts.append(part)
        offset = -(-part.end // ALIGNMENT) * ALIGNMENT
    return parts


def _staging(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory for one step. torch keeps pinned memory and gives it out again only when the
    copies from it are done, so that a step never writes into one that is still being sent."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
