"""AutoAWQ: 4-bit integers in groups of columns, packed along the outputs.

    qweight [k, n / 8] int32    qzeros [G, n / 8] int32    scales [G, n] float16

A word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight, lowest bits first (version "gemm").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Strict
from torch import Tensor

from mmdeploy_llm.weights.quantized import (
    FLOATS,
    CodeLayout,
    Flag,
    GroupedMatrix,
    GroupSize,
    QuantizedLayer,
    SchemeSettings,
    Stored,
    group_columns,
    read_settings,
    refuse,
    unpack_words,
)

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of the eight outputs lies
PER_WORD = 8


class AWQSettings(SchemeSettings):
    """quantization_config of AutoAWQ."""

    bits: Annotated[int, Strict()] = 4
    group_size: GroupSize = 128
    version: str = "gemm"
    zero_point: Flag = True


def awq_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for other widths and layouts."""
    renamed = {"bits": values.get("bits", values.get("w_bit", 4)), **values}
    if "q_group_size" in values:
        renamed["group_size"] = values["q_group_size"]
    settings = read_settings(AWQSettings, renamed)
    for name in stored.names(".qweight"):
        if settings.bits != 4 or settings.version.lower() != "gemm":
            found = f"{settings.bits} bits and version {settings.version!r}"
            raise refuse("AWQ", found, "4 bits and version 'gemm'", name)
        needed = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}
        parts = stored.parts(name, needed)
        k, num_words = stored.matrix(parts["codes"], torch.int32)
        n = num_words * PER_WORD
        num_groups = stored.matrix(parts["zeros"], torch.int32)[0]
        group_size = group_columns(parts["scales"], k, num_groups, settings.group_size)
        stored.check(parts["zeros"], (num_groups, num_words), torch.int32)
        dtype = stored.check(parts["scales"], (num_groups, n), *FLOATS).dtype
        yield QuantizedLayer(
            name=name,
            key=f"{name}.weight",
            parts=parts,
            shape=(n, k),
            dtype=dtype,
            decode=partial(_decode, group_size=group_size),
            layout=CodeLayout(bits=4, group_size=group_size),
        )


def _decode(parts: Mapping[str, Tensor], *, group_size: int) -> GroupedMatrix:
    return GroupedMatrix(
        codes=unpack_words(parts["codes"], 4, ORDER).T,
        scales=parts["scales"].T,
        zeros=unpack_words(parts["zeros"], 4, ORDER).T,
        group_size=group_size,
        dtype=parts["scales"].dtype,
    )
