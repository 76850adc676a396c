"""MXFP4 as checkpoints are published in it: 4-bit floats in blocks of 32 with an exponent each.

X_blocks [E, n, k / 32, 16] uint8    X_scales [E, n, k / 32] uint8    appear as X [E, k, n]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.weights.quantized import QuantizedLayer, Stored, float4, refuse, unpack_nibbles

BLOCK_BYTES = 16


def mxfp4_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised stacks of experts."""
    del values  # the format has no options
    for name in stored.names("_blocks"):
        parts = stored.parts(name, {"blocks": "_blocks", "scales": "_scales"})
        shape = stored.check(parts["scales"], None, torch.uint8).shape
        stored.check(parts["blocks"], (*shape, BLOCK_BYTES), torch.uint8)
        if len(shape) != 3 or not all(shape):
            raise refuse("MXFP4", f"scales of shape {list(shape)}", "stacks of experts", name)
        num_experts, n, num_blocks = shape
        yield QuantizedLayer(
            name=name,
            key=name,
            parts=parts,
            shape=(num_experts, num_blocks * BLOCK_BYTES * 2, n),
            dtype=torch.bfloat16,
            decode=_decode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Experts whose weights are dequantised one at a time."""

    blocks: Tensor
    scales: Tensor

    def rows(self, start: int, end: int) -> Tensor:
        """Returns experts start .. end, [end - start, k, n]."""
        values = float4(unpack_nibbles(self.blocks[start:end]), torch.bfloat16)
        exponents = self.scales[start:end, :, :, None].int() - 127
        return torch.ldexp(values, exponents).flatten(2).mT


def _decode(parts: Mapping[str, Tensor]) -> _Stack:
    return _Stack(blocks=parts["blocks"], scales=parts["scales"])
