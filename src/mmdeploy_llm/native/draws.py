"""Draws: the parts of a random draw that read the whole vocabulary; see kernels.DrawKernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .library import Library


class Draws(Library):
    """Implements kernels.DrawKernels with the C++ library."""

    def largest(self, logits: Tensor, num: int) -> tuple[Tensor, Tensor]:
        values = torch.empty(logits.shape[0], num)
        ids = torch.empty(logits.shape[0], num, dtype=torch.int64)
        self._library.largest(**_rows_of(logits), num=num, values=values, ids=ids)
        return values, ids

    def first_largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        peaks = torch.empty(logits.shape[0], dtype=logits.dtype)
        self._library.first_largest(**_rows_of(logits), ids=ids, peaks=peaks)
        return ids, peaks

    def temper(self, logits: Tensor, temperature: Tensor) -> Tensor:
        out = torch.empty(logits.shape)
        self._library.temper(**_rows_of(logits), temperatures=temperature, out=out)
        return out

    def weigh(self, logits: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.empty(logits.shape[0], dtype=torch.float64)
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.weigh(
            **_rows_of(logits),
            temperatures=temperature,
            uniforms=uniforms,
            sums=sums,
            tokens=tokens,
        )
        return sums, tokens

    def cut(self, z: Tensor, probs: Tensor, least: Tensor, top_k: Tensor, top_p: Tensor) -> None:
        self._library.cut(
            z=z,
            probs=probs,
            rows=z.shape[0],
            size=z.shape[1],
            least=least,
            top_k=top_k,
            top_p=top_p,
        )

    def invert(self, probs: Tensor, uniforms: Tensor) -> Tensor:
        tokens = torch.empty(probs.shape[0], dtype=torch.int64)
        self._library.invert(
            probs=probs, rows=probs.shape[0], size=probs.shape[1], uniforms=uniforms, tokens=tokens
        )
        return tokens


def _rows_of(logits: Tensor) -> Mapping[str, Any]:
    """Returns the arguments that say where the rows are."""
    rows, size = logits.shape
    place = {"dtype": logits.dtype, "logits": logits, "stride": logits.stride(0)}
    return place | {"rows": rows, "size": size}
