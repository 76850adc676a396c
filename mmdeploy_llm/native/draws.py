"""Draws: the parts of a random draw that read the whole vocabulary; see kernels.DrawKernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .library import DTYPES, Library


class Draws(Library):
    """Implements kernels.DrawKernels with the C++ library."""

    def largest(self, logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Returns the `num` largest values of each row of [R, V], descending, [R, num] float32, and
        their indices [R, num]; which of equal ones is not specified. NaN counts as largest."""
        values = torch.empty(logits.shape[0], num)
        ids = torch.empty(logits.shape[0], num, dtype=torch.int64)
        self._library.mm_largest(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            num,
            values.data_ptr(),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return values, ids

    def first_largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lowest index of the largest value of each row of [R, V], [R] int64, and that
        value, [R]; see kernels.DrawKernels."""
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        peaks = torch.empty(logits.shape[0], dtype=logits.dtype)
        self._library.mm_first_largest(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            ids.data_ptr(),
            peaks.data_ptr(),
            torch.get_num_threads(),
        )
        return ids, peaks

    def temper(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Returns (logits - largest of the row) / temperature, [R, V] -> [R, V] float32.
        temperature: [R] float32."""
        out = torch.empty(logits.shape)
        self._library.mm_temper(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            temperature.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def cut(self, z: Tensor, probs: Tensor, least: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """Returns the smallest z of each row that the rules keep, [R] float32; see
        kernels.DrawKernels."""
        cuts = torch.empty(z.shape[0])
        self._library.mm_cut(
            z.data_ptr(),
            probs.data_ptr(),
            *z.shape,
            least.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            cuts.data_ptr(),
            torch.get_num_threads(),
        )
        return cuts

    def invert(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """Returns the first index at which each row's cumulative sum exceeds uniform * total, [R]
        int64; see kernels.DrawKernels."""
        tokens = torch.empty(probs.shape[0], dtype=torch.int64)
        self._library.mm_invert(
            probs.data_ptr(),
            *probs.shape,
            uniforms.data_ptr(),
            tokens.data_ptr(),
            torch.get_num_threads(),
        )
        return tokens
