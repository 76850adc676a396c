"""FP8 as checkpoints are published in it: 8-bit floats with a scale for each block of a weight.

    weight [n, k] float8_e4m3fn    weight_scale_inv [n / 128, k / 128] (rounded up), or one number

A weight is its 8-bit value times its scale, computed in float32. transformers writes experts one by
one, but their scales in stacks:

    experts.7.gate_proj.weight, experts.7.up_proj.weight    experts.gate_up_proj_scale_inv[7]
    experts.7.down_proj.weight                              experts.down_proj_scale_inv[7]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from mmdeploy_llm.weights.quantized import (
    FLOATS,
    CodeLayout,
    GroupedMatrix,
    QuantizedLayer,
    SchemeSettings,
    Stored,
    power_of_two,
    read_settings,
    refuse,
)

EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # scales that are powers of two
# Stacks of scales, and the weights of an expert that have them, one below the other.
STACKS = (
    (".gate_up_proj_scale_inv", ("gate_proj", "up_proj")),
    (".up_proj_scale_inv", ("up_proj",)),
    (".down_proj_scale_inv", ("down_proj",)),
)


class FP8Settings(SchemeSettings):
    """quantization_config of fine-grained FP8. weight_block_size: rows and columns that share a
    scale; None: all."""

    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None


def fp8_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for scales of another shape."""
    settings = read_settings(FP8Settings, values)
    for name in stored.names(".weight_scale_inv"):
        parts = stored.parts(name, {"codes": ".weight", "scales": ".weight_scale_inv"})
        if stored.entries[parts["codes"]].dtype in FLOATS:
            continue  # blocks did not divide it; the scale means nothing
        yield _layer(name, parts, settings, stored)
    for suffix, weights in STACKS:
        for experts in stored.names(suffix):
            if f"{experts}.0.{weights[0]}.weight" in stored.entries:
                yield from _experts(experts, suffix, weights, settings, stored)


def _layer(
    name: str, parts: Mapping[str, str], settings: FP8Settings, stored: Stored
) -> QuantizedLayer:
    n, k = stored.matrix(parts["codes"], torch.float8_e4m3fn)
    rows, columns = settings.weight_block_size or (n, k)
    shape = (-(-n // rows), -(-k // columns))
    found = stored.entries[parts["scales"]].shape
    stored.check(
        parts["scales"],
        found if shape == (1, 1) and found in ((), (1,)) else shape,
        *FLOATS,
        *EXPONENTS,
    )
    return _found(name, parts, (n, k), (rows, columns), _whole)


def _experts(
    experts: str, suffix: str, weights: Sequence[str], settings: FP8Settings, stored: Stored
) -> Iterator[QuantizedLayer]:
    key = experts + suffix
    stack = stored.check(key, None, *FLOATS, *EXPONENTS).shape
    if len(stack) != 3 or (stack[1] > 1 and stack[1] % len(weights)):
        raise refuse("FP8", f"scales of shape {list(stack)}", "a stack of matrices", experts)
    for expert in range(stack[0]):
        for index, weight in enumerate(weights):
            name = f"{experts}.{expert}.{weight}"
            parts = {**stored.parts(name, {"codes": ".weight"}), "scales": key}
            n, k = stored.matrix(parts["codes"], torch.float8_e4m3fn)
            rows, columns = settings.weight_block_size or (n, k)
            num_rows, num_columns = -(-n // rows), -(-k // columns)
            # One scale is that of the whole stack of rows.
            first = index * num_rows if stack[1] > 1 else 0
            if stack[1:] not in ((num_rows * len(weights), num_columns), (1, 1)):
                found = f"scales {list(stack)} for a weight {[n, k]}"
                raise refuse("FP8", found, f"blocks of {[rows, columns]}", name)
            own = partial(_of_expert, expert=expert, rows=slice(first, first + num_rows))
            yield _found(name, parts, (n, k), (rows, columns), own)


def _whole(scales: Tensor) -> Tensor:
    return scales


def _of_expert(scales: Tensor, *, expert: int, rows: slice) -> Tensor:
    return scales[expert, rows]


def _found(
    name: str,
    parts: Mapping[str, str],
    shape: tuple[int, int],
    block: tuple[int, int],
    take: Callable[[Tensor], Tensor],
) -> QuantizedLayer:
    rows, columns = block
    num_scales = (-(-shape[0] // rows), -(-shape[1] // columns))
    return QuantizedLayer(
        name=name,
        key=parts["codes"],
        parts=parts,
        shape=shape,
        dtype=torch.float32,
        decode=partial(_decode, take=take, shape=num_scales, block_rows=rows, group_size=columns),
        layout=CodeLayout(bits=8, group_size=columns, is_float8=True),
    )


def _decode(
    parts: Mapping[str, Tensor],
    *,
    take: Callable[[Tensor], Tensor],
    shape: tuple[int, int],
    block_rows: int,
    group_size: int,
) -> GroupedMatrix:
    scales = take(parts["scales"])
    if scales.dtype is torch.uint8:
        scales = power_of_two(scales)
    return GroupedMatrix(
        codes=parts["codes"],
        scales=scales.float().reshape(shape),
        block_rows=block_rows,
        group_size=group_size,
        dtype=torch.float32,
    )
