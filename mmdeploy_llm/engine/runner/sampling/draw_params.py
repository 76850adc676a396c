"""DrawParams: the params of random draws, by rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """The params of random draws, one value for each row: [R]. top_k 0, top_p 1 and min_p 0 switch
    the rule off.

    temperature > 0. uniforms: random numbers in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    def take(self, rows: NDArray[np.int64]) -> DrawParams:
        """Returns the params of some rows."""
        return DrawParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniforms=self.uniforms[rows],
        )


def take_rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Returns some rows of [R, V], in ascending order; without a copy when it is all of them."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.from_numpy(rows).to(logits.device)]
