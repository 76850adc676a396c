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
        self._library.largest(
            dtype=DTYPES[logits.dtype],
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=logits.shape[0],
            size=logits.shape[1],
            num=num,
            values=values.data_ptr(),
            ids=ids.data_ptr(),
        )
        return values, ids

    def first_largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the lowest index of the largest value of each row of [R, V], [R] int64, and that
        value, [R]; see kernels.DrawKernels."""
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        peaks = torch.empty(logits.shape[0], dtype=logits.dtype)
        self._library.first_largest(
            dtype=DTYPES[logits.dtype],
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=logits.shape[0],
            size=logits.shape[1],
            ids=ids.data_ptr(),
            peaks=peaks.data_ptr(),
        )
        return ids, peaks

    def temper(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Returns (logits - largest of the row) / temperature, [R, V] -> [R, V] float32.
        temperature: [R] float32."""
        out = torch.empty(logits.shape)
        self._library.temper(
            dtype=DTYPES[logits.dtype],
            logits=logits.data_ptr(),
            stride=logits.stride(0),
            rows=logits.shape[0],
            size=logits.shape[1],
            temperatures=temperature.data_ptr(),
            out=out.data_ptr(),
        )
        return out

    def cut(self, z: Tensor, probs: Tensor, least: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """Returns the smallest z of each row that the rules keep, [R] float32; see
        kernels.DrawKernels."""
        cuts = torch.empty(z.shape[0])
        self._library.cut(
            z=z.data_ptr(),
            probs=probs.data_ptr(),
            rows=z.shape[0],
            size=z.shape[1],
            least=least.data_ptr(),
            top_k=top_k.data_ptr(),
            top_p=top_p.data_ptr(),
            cuts=cuts.data_ptr(),
        )
        return cuts

    def invert(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        """Returns the first index at which each row's cumulative sum exceeds uniform * total, [R]
        int64; see kernels.DrawKernels."""
        tokens = torch.empty(probs.shape[0], dtype=torch.int64)
        self._library.invert(
            probs=probs.data_ptr(),
            rows=probs.shape[0],
            size=probs.shape[1],
            uniforms=uniforms.data_ptr(),
            tokens=tokens.data_ptr(),
        )
        return tokens
