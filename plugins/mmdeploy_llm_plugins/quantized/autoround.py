"""AutoRound: the layouts of GPTQ and AWQ under a name of its own.

packing_format                         layout
auto_round:auto_gptq, auto_round:gptq  GPTQ, zero points minus one
auto_round, auto_round:gptqmodel       GPTQ, zero points as they are
auto_round:auto_awq, auto_round:awq    AWQ
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmdeploy_llm.weights.quantized import (
    QuantizedLayer,
    SchemeSettings,
    Stored,
    read_settings,
    refuse,
)

from .awq import awq_layers
from .gptq import gptq_layers

GPTQ_FORMATS = {
    "auto": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
}
AWQ_FORMATS = ("auto_round:auto_awq", "auto_round:awq")


class AutoRoundSettings(SchemeSettings):
    """quantization_config of AutoRound."""

    packing_format: str = "auto_round:auto_gptq"


def autoround_layers(values: Mapping[str, Any], stored: Stored) -> Iterator[QuantizedLayer]:
    """Yields the quantised layers. Raises CheckpointError for other layouts."""
    kind = read_settings(AutoRoundSettings, values).packing_format
    if kind in AWQ_FORMATS:
        yield from awq_layers({**values, "version": "gemm"}, stored)
    elif kind in GPTQ_FORMATS:
        yield from gptq_layers({**values, "checkpoint_format": GPTQ_FORMATS[kind]}, stored)
    else:
        supported = ", ".join((*GPTQ_FORMATS, *AWQ_FORMATS))
        first = next(iter(stored.entries))
        raise refuse("AutoRound", f"packing_format {kind!r}", supported, first)
