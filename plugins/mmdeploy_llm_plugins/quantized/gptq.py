"""GPTQ: integers of 2, 3, 4 or 8 bits in groups of columns, packed along the inputs.

    qweight [k * bits / 32, n] int32    qzeros [G, n * bits / 32] int32
    scales [G, n] float16               g_idx [k] int32, the group of each column

The first version of the format stores zero points minus one, the second ("gptq_v2") as they are.
Layers may differ in bits and groups (the rules `dynamic` of GPTQModel, `extra_config` of
AutoRound); the shapes of their tensors say which they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Strict
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.quantized import (
    FLOATS,
    Flag,
    GroupedMatrix,
    GroupSize,
    PackedNibbles,
    QuantizedLayer,
    SchemeSettings,
    Stored,
    group_columns,
    integer_layout,
    read_settings,
    refuse,
    unpack_dense,
)

WORD = 32  # bits
OFFSETS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero point
BITS = (2, 3, 4, 8)
SUPPORTED = "2, 3, 4 and 8 bits in 'gptq' and 'gptq_v2'"


class GPTQSettings(SchemeSettings):
    """quantization_config of AutoGPTQ, GPTQModel and AutoRound."""

    bits: Annotated[int, Strict()]
    group_size: GroupSize = 128
    desc_act: Flag | None = None  # not needed: g_idx says it
    sym: Flag | None = None  # nor this: qzeros do
    checkpoint_format: str = "gptq"


def gptq_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for other widths and formats."""
    settings = read_settings(GPTQSettings, values)
    for name in stored.names(".qweight"):
        if settings.bits not in BITS or settings.checkpoint_format not in OFFSETS:
            found = f"{settings.bits} bits in the format {settings.checkpoint_format!r}"
            raise refuse("GPTQ", found, SUPPORTED, name)
        yield _layer(settings, stored, name)


def _layer(settings: GPTQSettings, stored: Stored, name: str) -> QuantizedLayer:
    needed = {"codes": ".qweight", "zeros": ".qzeros", "scales": ".scales"}
    parts = stored.parts(name, needed, {"group_of": ".g_idx"})
    num_words, n = stored.matrix(parts["codes"], torch.int32)
    num_groups, words_of_zeros = stored.matrix(parts["zeros"], torch.int32)
    bits, rest = divmod(words_of_zeros * WORD, n)
    if rest or bits not in BITS:
        found = f"{words_of_zeros * WORD / n:g} bits (by {parts['codes']} and {parts['zeros']})"
        raise refuse("GPTQ", found, SUPPORTED, name)
    k = num_words * WORD // bits
    group_size = group_columns(parts["scales"], k, num_groups, settings.group_size)
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
            bits=bits,
            group_size=group_size,
            offset=OFFSETS[settings.checkpoint_format],
        ),
        layout=integer_layout(bits, group_size, group_of),
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
    k, n = words.shape[1] * WORD // bits, words.shape[0]
    return GroupedMatrix(
        codes=PackedNibbles(words, k) if bits == 4 else unpack_dense(words, bits, k),
        scales=parts["scales"].T,
        zeros=_zeros(parts["zeros"], bits, n, offset).T,
        group_size=group_size,
        group_of=group_of,
        dtype=parts["scales"].dtype,
    )


def _zeros(words: Tensor, bits: int, n: int, offset: int) -> Tensor:
    """Returns the zero points, [G, n]. Those of the first version were lowered by one as whole
    words, so that a zero borrows from its neighbour; where values cross words (3 bits), as values
    that wrap around."""
    if WORD % bits:
        zeros: Tensor = (unpack_dense(words, bits, n) + offset) & (2**bits - 1)
        return zeros
    ones = offset * sum(1 << shift for shift in range(0, WORD, bits))
    raised = (words.long() + ones).to(torch.int32)
    return unpack_dense(raised, bits, n)
