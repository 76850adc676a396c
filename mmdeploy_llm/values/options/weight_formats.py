"""FORMATS: the table of the formats to which `quantization` rounds weights while they are loaded.
All that depends on a format reads its row here, and a format is added as one more row.

Every format has a scale and an integer zero for each group of columns of a row:

    weight = scale * (code - zero)        code: 0 .. 2 ** bits - 1

What checkpoints store, 8-bit floats too, is described by kernels.coded.CodeLayout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

WHOLE_ROW = -1  # as the option quantization_group_size
MAX_GROUP = 2**31 - 1  # columns: more than a row has
PACK_QUANTIZED = "pack-quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """One way to round the weights of a decoder's layers, and what becomes of the other weights.

    name, alias: the value of the option `quantization`, and FastDeploy's name for it.
    bits: of a weight.
    group_size: columns that share a scale and a zero; None: a row has one of each, always. These
        formats have products of their own, S8Weight (kernels/cpu/products.py) and Int8Rows
        (kernels/cuda/int8.py), the only ones that round activations on CUDA too. The others are
        CodedPanels (kernels/cpu/coded.py) and CudaCodes (kernels/cuda/codes.py).
    activation_bits: of the rows of x in products, with a scale for every 64 values on a CPU, which
        are rotated with the columns of weights that have no groups; None: x stays as it is.
    on_cuda: the format that a GPU takes instead; None: this one. Products on CUDA round the rows of
        x only where weights have a scale for each row, so that a model in 4 bits has nothing of it.
    elsewhere: the format of linear layers outside of a decoder's layers: an output head, a tower.
    tied_head: the format of an output head that is the embedding too. It needs more scales than a
        product does.
    transformers: the format of compressed-tensors in which such weights are saved and transformers
        reads them; None: they are not saved.
    kept: percent of the best tokens of a model of 0.1 B parameters that stay those of float32 on a
        CPU, as examples/benchmarks/QUALITY.md has them.
    kept_on_cuda: the same on CUDA; None: as many.
    summary: what a user reads about the format.
    """

    name: str
    alias: str | None = None
    bits: Literal[4, 8]
    group_size: int | None
    activation_bits: Literal[8] | None = None
    on_cuda: str | None = None
    elsewhere: str
    tied_head: str
    transformers: str | None = PACK_QUANTIZED
    kept: int
    kept_on_cuda: int | None = None
    summary: str


def _table(*rows: WeightFormat) -> Mapping[str, WeightFormat]:
    return MappingProxyType({row.name: row for row in rows})


FORMATS = _table(
    WeightFormat(
        name="int8",
        alias="w8a8",
        bits=8,
        group_size=None,
        activation_bits=8,
        elsewhere="int8",
        tied_head="int8a8",
        transformers=None,
        kept=95,
        kept_on_cuda=89,  # nothing is rotated there
        summary="8 bits by row, activations too",
    ),
    WeightFormat(
        name="int4",
        alias="w4a8",
        bits=4,
        group_size=64,
        activation_bits=8,
        on_cuda="int4wo",
        elsewhere="int8",
        tied_head="int8a8",
        kept=66,
        summary="4 bits, activations 8 on CPUs",
    ),
    WeightFormat(
        name="int8wo",
        alias="wint8",
        bits=8,
        group_size=128,
        elsewhere="int8wo",
        tied_head="int8wo",
        kept=96,
        summary="8 bits",
    ),
    WeightFormat(
        name="int4wo",
        alias="wint4",
        bits=4,
        group_size=64,
        elsewhere="int8wo",
        tied_head="int8wo",
        kept=67,
        summary="4 bits",
    ),
    WeightFormat(
        name="int8a8",
        bits=8,
        group_size=128,
        activation_bits=8,
        elsewhere="int8a8",
        tied_head="int8a8",
        kept=94,
        summary="8 bits, activations too",
    ),
    WeightFormat(
        name="int4a8",
        bits=4,
        group_size=64,
        activation_bits=8,
        elsewhere="int8",
        tied_head="int8a8",
        kept=66,
        summary="4 bits, activations 8",
    ),
)
KEPT_BY_KV_CACHE: Mapping[str, int] = MappingProxyType({"int4": 90})  # the same of kv_cache_dtype
BUILT_IN = "builtin"  # what to calibrate with: the prompts that come with this package
LOOKED_UP = "int8wo"  # the format of embeddings that nothing is multiplied by

if TYPE_CHECKING:
    QuantizationName = str
else:
    QuantizationName = Literal[tuple(FORMATS)]


def quantization_name(value: Any) -> Any:
    """Turns FastDeploy's names into ours. Raises ValueError for 8-bit floats."""
    if not isinstance(value, str):
        return value
    if "fp8" in value:
        raise ValueError(
            f"weights are not rounded to 8-bit floats, got {value!r}; use 'int8wo', which takes as "
            "much memory and is nearer to the weights; a checkpoint that is stored in FP8 stays in "
            "8 bits without this option"
        )
    aliases = {row.alias: row.name for row in FORMATS.values() if row.alias}
    return aliases.get(value, value)


def rounds_inputs(quantization: QuantizationName | None) -> bool:
    """Whether products round the rows of x too."""
    return quantization is not None and FORMATS[quantization].activation_bits is not None


def kept_by(*, is_cuda: bool) -> Mapping[str, int]:
    """Returns for each format how many percent of a small model's best tokens it keeps."""
    rows = FORMATS.items()
    return {name: (is_cuda and row.kept_on_cuda) or row.kept for name, row in rows}


def format_on(quantization: QuantizationName | None, *, is_cuda: bool) -> QuantizationName | None:
    """Returns the format that a device takes for `quantization`."""
    own = FORMATS[quantization].on_cuda if is_cuda and quantization is not None else None
    return own or quantization


def with_group_size(
    quantization: QuantizationName | None, group_size: int | None
) -> Mapping[str, WeightFormat]:
    """Returns FORMATS with another group size for `quantization`, on CUDA too: WHOLE_ROW, or None
    as it is."""
    if quantization is None or group_size is None or FORMATS[quantization].group_size is None:
        return FORMATS
    size = MAX_GROUP if group_size == WHOLE_ROW else group_size
    names = {quantization, FORMATS[quantization].on_cuda or quantization}
    own = {name: replace(FORMATS[name], group_size=size) for name in names}
    return MappingProxyType({**FORMATS, **own})


def names_of(rows: Iterable[WeightFormat]) -> str:
    """Returns the names of formats as a message lists them: "int8, int4 or int8wo"."""
    *names, last = (row.name for row in rows)
    return f"{', '.join(names)} or {last}"


def described() -> str:
    """Returns what a user reads about all formats."""
    labels = (f"{row.name} ({row.alias})" if row.alias else row.name for row in FORMATS.values())
    rows = zip(labels, FORMATS.values(), strict=True)
    return "; ".join(f"{label}: {row.summary}" for label, row in rows)
