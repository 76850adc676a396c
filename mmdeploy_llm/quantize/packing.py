"""Lays rounded matrices out as compressed-tensors does in its format pack-quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits

from .rounding import Rounded


def packed_tensors(name: str, rounded: Rounded, bits: Bits) -> dict[str, Tensor]:
    """Returns the stored tensors of layer `name`, by key. Zero points are packed along the rows."""
    return {
        f"{name}.weight_packed": words_of(rounded.codes, bits),
        f"{name}.weight_scale": rounded.scales,
        f"{name}.weight_zero_point": words_of(rounded.zeros.T, bits).T.contiguous(),
        f"{name}.weight_shape": torch.tensor(rounded.codes.shape),
    }


def words_of(codes: Tensor, bits: Bits) -> Tensor:
    """Packs codes [r, c] uint8 into int32 [r, c * bits / 32, rounded up], lowest bits first."""
    padded = F.pad(codes, (0, -codes.shape[1] % (32 // bits))).contiguous()
    if bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    return padded.flatten().view(torch.int32).view(len(codes), -1)


def settings(bits: Bits, group_size: int, ignored: Sequence[str]) -> Mapping[str, Any]:
    """Returns the quantization_config for config.json. ignored: linear layers that stay floats."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignored),
    }
