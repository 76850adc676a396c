"""A format of quantised weights in one file: 8 bits for each weight, a scale for each row.

    X.codes [n, k] int8    X.row_scales [n] float32    weight = code * scale of its row

config.json says {"quantization_config": {"quant_method": "rows8", "highest": 127}}; codes lie
between -highest and highest. The engine keeps such weights in 8 bits where its kernels can multiply
by them, and dequantises them where not.
"""

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import WeightFormatSpec, hookimpl
from mmdeploy_llm.weights.quantized import (
    CodeLayout,
    GroupedMatrix,
    QuantizedLayer,
    WeightSettings,
    read_settings,
)

CODES, SCALES = ".codes", ".row_scales"


@hookimpl
def provide_weight_formats():
    """Lists the format."""
    return [
        WeightFormatSpec(
            name="rows8",
            factory=f"{__name__}:layers",
            suffixes=(CODES, SCALES),
            quantise=f"{__name__}:quantise",
        )
    ]


class Rows8Settings(WeightSettings):
    """quantization_config: any other key is refused."""

    highest: int


def layers(settings, stored):
    """Yields the weights: which tensors they have, and how these are decoded."""
    own = read_settings(Rows8Settings, settings)
    if not 1 <= own.highest <= 127:
        raise CheckpointError(f"highest in quantization_config is {own.highest}, allowed: 1 to 127")
    for name in stored.names(CODES):
        parts = stored.parts(name, {"codes": CODES, "scales": SCALES})  # or an error names it
        n, k = stored.matrix(parts["codes"], torch.int8)
        stored.check(parts["scales"], (n,), torch.float32)
        yield QuantizedLayer(
            name=name,
            key=f"{name}.weight",
            parts=parts,
            shape=(n, k),
            dtype=torch.float32,
            decode=decode,
            layout=CodeLayout(bits=8, group_size=k),  # it may stay in 8 bits
        )


def decode(parts):
    """Returns (codes - zeros) * scales, whose rows are computed when they are needed."""
    codes = parts["codes"]
    return GroupedMatrix(
        codes=codes,
        scales=parts["scales"][:, None],
        group_size=codes.shape[1],
        dtype=torch.float32,
    )


def quantise(weight):
    """Returns the tensors of a weight [n, k] and the settings: for tests, and to write files."""
    scales = weight.abs().amax(1).clamp(min=1e-12) / 127
    codes = (weight / scales[:, None]).round().to(torch.int8)
    return {CODES: codes, SCALES: scales}, {"quant_method": "rows8", "highest": 127}
