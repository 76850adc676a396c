"""TensorFile: what a file of weights shows to whoever loads a model, whatever its format: named
tensors that are read into parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout

ROWS_BYTES = 64 * 2**20  # of floats that are dequantised at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stored tensor. offset: position of its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class TensorFile(Protocol):
    """The tensors of a file, ready to be read into parameters."""

    @property
    def path(self) -> Path:
        """The file, for messages."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors, by key."""

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """Fills the contiguous `out` with values of tensor `key`, starting at value `first_value`.

        Casts to `out`'s dtype. transpose: the file stores the last two axes swapped (`out.mT`).
        """


@runtime_checkable
class CodedFile(TensorFile, Protocol):
    """A file that stores weights in few bits, which may stay so."""

    def layout(self, key: str) -> CodeLayout | None:
        """Returns the layout of a weight that can stay in few bits; None where it cannot."""

    def read_coded(self, key: str, out: Tensor | None = None) -> CodedWeight:
        """Reads a weight that has a layout. out: [n, U] int32; may become its units."""


class WeightRows(Protocol):
    """A weight whose rows (first axis) are dequantised when they are asked for."""

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows start .. end, in the dtype of the weight's entry."""


def copy_rows(
    weight: WeightRows, shape: Sequence[int], first: int, out: Tensor, *, transpose: bool
) -> None:
    """Dequantises the rows from `first` on that fill `out`, a bounded number at a time. shape: of
    the whole weight."""
    target = out.mT if transpose else out
    rows = target.view(-1, *shape[1:]) if target.is_contiguous() else target
    step = max(1, ROWS_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, rows.shape[0], step):
        end = min(start + step, rows.shape[0])
        rows[start:end].copy_(weight.rows(first + start, first + end))
