"""FP8 as Qwen and DeepSeek publish it: 8-bit floats with a scale for each block of a weight.

    weight [n, k] float8_e4m3fn    weight_scale_inv [n / 128, k / 128] (rounded up), or one number

A weight is its 8-bit value times its scale, computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor

from mmdeploy_llm.kernels.coded import CodeLayout

from .bits import power_of_two
from .layer import GroupedMatrix, QuantizedLayer
from .method import FLOATS, Stored
from .settings import SchemeSettings, read_settings

EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # scales that are powers of two


class FP8Settings(SchemeSettings):
    """quantization_config of fine-grained FP8. weight_block_size: rows and columns that share a
    scale; None: all."""

    weight_block_size: tuple[PositiveInt, PositiveInt] | None = None


def fp8_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for scales of another shape."""
    settings = read_settings(FP8Settings, values)
    for name in stored.names(".weight_scale_inv"):
        parts = stored.parts(name, {"codes": ".weight", "scales": ".weight_scale_inv"})
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
        yield QuantizedLayer(
            name=name,
            key=parts["codes"],
            parts=parts,
            shape=(n, k),
            dtype=torch.float32,
            decode=partial(_decode, shape=shape, block_rows=rows, group_size=columns),
            layout=CodeLayout(bits=8, group_size=columns, is_float8=True),
        )


def _decode(
    parts: Mapping[str, Tensor], *, shape: tuple[int, int], block_rows: int, group_size: int
) -> GroupedMatrix:
    scales = parts["scales"]
    if scales.dtype is torch.uint8:
        scales = power_of_two(scales)
    return GroupedMatrix(
        codes=parts["codes"],
        scales=scales.float().view(shape),
        block_rows=block_rows,
        group_size=group_size,
        dtype=torch.float32,
    )
