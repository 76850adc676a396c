"""Rounders: how the tensors of a checkpoint are rounded while they are copied."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from mmdeploy_llm.kernels.cpu import CpuKernels
from mmdeploy_llm.values.options.weight_formats import QuantizationName

from .rounding import Rounded, Scheme, relative_error, round_groups

# Of a matrix: in a decoder's layers, of an expert in these, the output head, or anywhere else, such
# as vision towers.
Place = Literal["layers", "experts", "head", "towers"]


class Rounder(Protocol):
    """Rounds matrices."""

    def scheme(self, place: Place) -> Scheme | None:
        """Returns how matrices of a place are rounded; None: they are copied."""

    def round(self, key: str, weight: Tensor, scheme: Scheme) -> Rounded:
        """Rounds tensor `key` [n, k]; the group size of `scheme` divides k."""


class GroupRounder:
    """Rounds each value to the nearest code of its group, as round_groups does; experts
    symmetrically, since no other library reads others; the output head is copied."""

    def __init__(self, layers: Scheme, towers: Scheme | None = None) -> None:
        """layers, towers: the schemes of matrices in a decoder's layers, and elsewhere."""
        experts = replace(layers, is_symmetric=True)
        self._schemes = {"layers": layers, "experts": experts, "towers": towers}

    def scheme(self, place: Place) -> Scheme | None:
        """See Rounder."""
        return self._schemes.get(place)

    def round(self, key: str, weight: Tensor, scheme: Scheme) -> Rounded:
        """See Rounder."""
        del key
        return round_groups(weight, scheme)


class KernelRounder:
    """Rounds as an engine does that loads the same weights with `quantization`."""

    def __init__(
        self, kernels: CpuKernels, quantization: QuantizationName, dtype: torch.dtype
    ) -> None:
        """quantization: one whose weights have codes in a decoder's layers. dtype: of the loaded
        weights."""
        self._kernels, self._quantization, self._dtype = kernels, quantization, dtype

    def scheme(self, place: Place) -> Scheme | None:
        """See Rounder. None where a place is not rounded as the decoder's layers are: transformers
        reads every layer but experts by one scheme. What is copied is rounded when the folder is
        loaded."""
        own = self._kernels.formats[self._quantization]
        if place not in ("layers", "experts") and not self._is_as_coarse(own.elsewhere):
            return None
        assert own.group_size is not None, f"{own.name} has no scheme that transformers reads"
        return Scheme(bits=own.bits, group_size=own.group_size)

    def _is_as_coarse(self, name: str) -> bool:
        """Whether another format rounds weights as ours does."""
        own, other = (self._kernels.formats[each] for each in (self._quantization, name))
        return (own.bits, own.group_size) == (other.bits, other.group_size)

    def round(self, key: str, weight: Tensor, scheme: Scheme) -> Rounded:
        """See Rounder."""
        del key
        weight = weight.to(self._dtype).contiguous()
        size = min(scheme.group_size, weight.shape[1])
        coded = self._kernels.round_codes(weight, scheme.bits, size)
        assert coded.zeros is not None
        return Rounded(
            codes=coded.codes(),
            scales=coded.scales.bfloat16(),
            zeros=coded.zeros,
            squared_error=relative_error(coded.dequantize(), weight),
        )
