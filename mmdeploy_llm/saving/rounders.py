"""Rounders: how the tensors of a checkpoint are rounded while they are copied."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import CODES, Bits, CodedWeight, CodeLayout
from mmdeploy_llm.layers.install import ELSEWHERE
from mmdeploy_llm.option_types import QuantizationName

from .rounding import Rounded, relative_error, round_groups

# Of a matrix: in a decoder's layers, the output head, or anywhere else, such as vision towers.
Place = Literal["layers", "head", "towers"]


class Rounder(Protocol):
    """Rounds matrices."""

    def layout(self, place: Place) -> CodeLayout | None:
        """Returns how matrices of a place are rounded; None: they are copied."""
        ...

    def round(self, key: str, weight: Tensor, layout: CodeLayout) -> Rounded:
        """Rounds tensor `key` [n, k]; the group size of `layout` divides k."""
        ...


class GroupRounder:
    """Rounds each value to the nearest code of its group, as round_groups does; the output head is
    copied."""

    def __init__(self, layers: CodeLayout, towers: CodeLayout | None = None) -> None:
        """layers, towers: the layouts of matrices in a decoder's layers, and elsewhere."""
        self._layouts = {"layers": layers, "towers": towers}

    def layout(self, place: Place) -> CodeLayout | None:
        """See Rounder."""
        return self._layouts.get(place)

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

    def layout(self, place: Place) -> CodeLayout | None:
        """See Rounder. None too where 8 bits have a scale for each row only (int4a8's head)."""
        own = self._quantization if place == "layers" else ELSEWHERE[self._quantization]
        return CODES.get(own)

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
