"""Lays rounded matrices out as compressed-tensors does in its format pack-quantized."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits
from mmdeploy_llm.values.options.weight_formats import MAX_GROUP, PACK_QUANTIZED

from .rounding import Rounded, Scheme

ANY_NUMBER = "[0-9]{1,4}"
KEPT = (0, 1, 99)  # numbers of a name that its pattern keeps, from the last on


def packed_tensors(name: str, rounded: Rounded, scheme: Scheme) -> dict[str, Tensor]:
    """Returns the stored tensors of layer `name`, by key. Zero points are packed along the rows."""
    found = {
        f"{name}.weight_packed": words_of(rounded.codes, scheme.bits),
        f"{name}.weight_scale": rounded.scales,
        f"{name}.weight_shape": torch.tensor(rounded.codes.shape),
    }
    if not scheme.is_symmetric:
        zeros = words_of(rounded.zeros.T, scheme.bits).T.contiguous()
        found[f"{name}.weight_zero_point"] = zeros
    return found


def words_of(codes: Tensor, bits: Bits) -> Tensor:
    """Packs codes [r, c] uint8 into int32 [r, c * bits / 32, rounded up], lowest bits first."""
    padded = F.pad(codes, (0, -codes.shape[1] % (32 // bits))).contiguous()
    if bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    return padded.flatten().view(torch.int32).view(len(codes), -1)


def settings(layers: Mapping[Scheme, Sequence[str]], ignored: Sequence[str]) -> Mapping[str, Any]:
    """Returns the quantization_config for config.json. layers: the layers of each scheme; those of
    the first are named by their class, the others by patterns. ignored: linear layers that stay
    floats; an output head without a tensor of its own is among them."""
    rounded = [name for names in layers.values() for name in names]
    known = {*rounded, *ignored}
    heads = [] if any(name.endswith("lm_head") for name in rounded) else ["lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": PACK_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": patterns_of(names, known - {*names}) if index else ["Linear"],
                "weights": _weights(scheme),
            }
            for index, (scheme, names) in enumerate(layers.items())
        },
        "ignore": [*heads, *patterns_of(ignored, rounded)],
    }


def patterns_of(names: Sequence[str], others: Iterable[str]) -> list[str]:
    """Returns patterns that match `names` wherever they stand in a larger model, and none of
    `others`: one for names that differ in numbers only, where that is possible."""
    others = list(others)
    taken = [{_shape(name, kept) for name in others} for kept in KEPT]
    found: dict[str, None] = {}
    for name in names:
        shapes = [_shape(name, kept) for kept in KEPT]
        free = (shape for shape, own in zip(shapes, taken, strict=True) if shape not in own)
        found[next(free, shapes[-1])] = None
    return [f"re:(.*\\.)?{shape}$" for shape in found]


def _shape(name: str, num_kept: int) -> str:
    """Returns a pattern of the name with any numbers but its last `num_kept`."""
    parts = re.split(r"(\d+)", name)  # texts, with a number between two
    last = len(parts) - 2 * num_kept
    return "".join(
        ANY_NUMBER if index % 2 and index < last else re.escape(part)
        for index, part in enumerate(parts)
    )


def _weights(scheme: Scheme) -> Mapping[str, Any]:
    groups: Mapping[str, Any] = {"strategy": "group", "group_size": scheme.group_size}
    return {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.is_symmetric,
        **({"strategy": "channel"} if scheme.group_size == MAX_GROUP else groups),
        "dynamic": False,
    }
