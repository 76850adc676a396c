"""Rounders: how the tensors of a checkpoint are rounded while they are copied."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import CODES, Bits, CodedWeight, CodeLayout
from mmdeploy_llm.layers.install import ELSEWHERE
from mmdeploy_llm.option_types import QuantizationName

from .rounding import Rounded, round_groups


class Rounder(Protocol):
    """Rounds matrices."""

    def layout(self, *, is_in_layers: bool) -> CodeLayout | None:
        """Returns how matrices in a decoder's layers, or elsewhere, are rounded; None: they are
        copied."""
        ...

    def round(self, key: str, weight: Tensor, layout: CodeLayout) -> Rounded:
        """Rounds tensor `key` [n, k]; the group size of `layout` divides k."""
        ...


class GroupRounder:
    """Rounds each value to the nearest code of its group, as round_groups does."""

    def __init__(self, layers: CodeLayout, elsewhere: CodeLayout | None = None) -> None:
        """layers, elsewhere: the layouts of matrices in a decoder's layers, and of others."""
        self._layers, self._elsewhere = layers, elsewhere

    def layout(self, *, is_in_layers: bool) -> CodeLayout | None:
        """See Rounder."""
        return self._layers if is_in_layers else self._elsewhere

    def round(self, key: str, weight: Tensor, layout: CodeLayout) -> Rounded:
        """See Rounder."""
        del key
        return round_groups(weight, layout.bits, layout.group_size)


class RoundsCodes(Protocol):
    """The kernels that round the weights of a model while it is loaded."""

    def round_codes(self, weight: Tensor, bits: Bits, group_size: int) -> CodedWeight:
        """Rounds a matrix, contiguous, to codes with integer zeros and scales in bf16."""
        ...


class KernelRounder:
    """Rounds as an engine does that loads the same weights with `quantization`."""

    def __init__(
        self, kernels: RoundsCodes, quantization: QuantizationName, dtype: torch.dtype
    ) -> None:
        """quantization: one whose weights have codes in a decoder's layers. dtype: of the loaded
        weights."""
        self._kernels, self._quantization, self._dtype = kernels, quantization, dtype

    def layout(self, *, is_in_layers: bool) -> CodeLayout | None:
        """See Rounder. None too where 8 bits have a scale for each row only (int4a8's head)."""
        return CODES.get(self._quantization if is_in_layers else ELSEWHERE[self._quantization])

    def round(self, key: str, weight: Tensor, layout: CodeLayout) -> Rounded:
        """See Rounder."""
        del key
        weight = weight.to(self._dtype).contiguous()
        coded = self._kernels.round_codes(weight, layout.bits, layout.group_size)
        assert coded.zeros is not None
        return Rounded(
            codes=coded.codes(),
            scales=coded.scales.bfloat16(),
            zeros=coded.zeros,
            squared_error=relative_error(coded.dequantize(), weight),
        )


def relative_error(rounded: Tensor, weight: Tensor) -> float:
    """Returns the sum of (rounded - weight)^2 over the sum of weight^2."""
    total = float(weight.double().square().sum())
    return float((rounded.double() - weight.double()).square().sum()) / total if total else 0.0
