"""Draws: random draws and the largest logits of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.kernels.base import DrawRules

from .library import Library


class Draws(Library):
    """Draws with the C++ library."""

    def can_draw(self, logits: Tensor) -> bool:
        return self.takes(logits)

    def first_largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        peaks = torch.empty(logits.shape[0], dtype=logits.dtype)
        self._library.first_largest(**_rows_of(logits), ids=ids, peaks=peaks)
        return ids, peaks

    def draw(self, logits: Tensor, rules: DrawRules) -> Tensor:
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        self._library.draw(
            **_rows_of(logits),
            temperatures=rules.temperature,
            least=rules.least,
            top_k=rules.top_k,
            top_p=rules.top_p,
            uniforms=rules.uniforms,
            tokens=tokens,
        )
        return tokens


def _rows_of(logits: Tensor) -> Mapping[str, Any]:
    """Returns the arguments that say where the rows are."""
    rows, size = logits.shape
    place = {"dtype": logits.dtype, "logits": logits, "stride": logits.stride(0)}
    return place | {"rows": rows, "size": size}
