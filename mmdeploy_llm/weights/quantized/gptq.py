"""GPTQ: integers of 2, 4 or 8 bits in groups of columns, packed along the inputs.

    qweight [k * bits / 32, n] int32    qzeros [G, n * bits / 32] int32
    scales [G, n] float16               g_idx [k] int32, the group of each column

The first version of the format stores zero points minus one, the second ("gptq_v2") as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError

from .bits import WORD, unpack_words
from .layer import GroupedMatrix, PackedNibbles, QuantizedLayer, integer_layout
from .method import FLOATS, Stored, refuse
from .settings import SchemeSettings, read_settings

OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point
BITS = (2, 4, 8)


class GPTQSettings(SchemeSettings):
    """quantization_config of AutoGPTQ and GPTQModel."""

    bits: int
    group_size: int = 128
    checkpoint_format: str = "gptq"


def gptq_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for other widths and formats."""
    settings = read_settings(GPTQSettings, values)
    for name in stored.names(".qweight"):
        if settings.bits not in BITS or settings.checkpoint_format not in OFFSETS:
            found = f"{settings.bits} bits in the format {settings.checkpoint_format!r}"
            raise refuse("GPTQ", found, "2, 4 and 8 bits in 'gptq' and 'gptq_v2'", name)
        yield _layer(settings, stored, name)


def _layer(settings: GPTQSettings, stored: Stored, name: str) -> QuantizedLayer:
    needed = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}
    parts = stored.parts(name, needed, {"group_of": ".g_idx"})
    num_words, n = stored.matrix(parts["codes"], torch.int32)
    k = num_words * WORD // settings.bits
    group_size = k if settings.group_size <= 0 else settings.group_size
    num_groups = -(-k // group_size)
    stored.check(parts["zeros"], (num_groups, n * settings.bits // WORD), torch.int32)
    dtype = stored.check(parts["scales"], (num_groups, n), *FLOATS).dtype
    group_of = None
    if "group_of" in parts:
        stored.check(parts["group_of"], (k,), torch.int32)
        group_of = stored.read(parts["group_of"])
        if torch.equal(group_of, torch.arange(k, dtype=torch.int32) // group_size):
            group_of = None
            parts["runs"] = parts.pop("group_of")  # says nothing that group_size does not say
    return QuantizedLayer(
        name=name,
        key=f"{name}.weight",
        parts=parts,
        shape=(n, k),
        dtype=dtype,
        decode=partial(
            _decode,
            name=name,
            bits=settings.bits,
            group_size=group_size,
            offset=OFFSETS[settings.checkpoint_format],
        ),
        layout=integer_layout(settings.bits, group_size, group_of),
    )


def _decode(
    parts: Mapping[str, Tensor], *, name: str, bits: int, group_size: int, offset: int
) -> GroupedMatrix:
    num_groups = parts["scales"].shape[0]
    group_of = parts["group_of"].long() if "group_of" in parts else None
    if group_of is not None and not 0 <= group_of.min() <= group_of.max() < num_groups:
        raise CheckpointError(
            f"{name}.g_idx names groups {group_of.min()} to {group_of.max()}, but there are "
            f"{num_groups}; the file is damaged"
        )
    # Words lie along the inputs: each column of words becomes a row of codes.
    words = parts["codes"].T.contiguous()
    return GroupedMatrix(
        codes=PackedNibbles(words, words.shape[1] * 8) if bits == 4 else unpack_words(words, bits),
        scales=parts["scales"].T,
        zeros=unpack_words(parts["zeros"], bits).T + offset,
        group_size=group_size,
        group_of=group_of,
        dtype=parts["scales"].dtype,
    )
