"""Reads quantised checkpoints: each quantised weight appears as an ordinary tensor of floats.

A format is a WeightFormatSpec of a plugin, see `mmdeploy_llm.hooks`. Its function gets the settings
and the stored tensors, and says which of them make up a weight:

    def layers(settings, stored):
        own = read_settings(MySettings, settings)
        for name in stored.names(".codes"):
            parts = stored.parts(name, {"codes": ".codes", "scales": ".scales"})
            n, k = stored.matrix(parts["codes"], torch.int8)
            stored.check(parts["scales"], (n, k // own.group_size), torch.float16)
            yield QuantizedLayer(name=name, key=f"{name}.weight", parts=parts, shape=(n, k), ...)

The weights that a checkpoint quantises are known by the names of their tensors, so that whatever a
file holds in floats stays as it is; config.json's quantization_config says how to read the others.
"""

from mmdeploy_llm.kernels.coded import CodeLayout
from mmdeploy_llm.weights.tensor_file import Entry, WeightRows

from .layer import (
    GroupedMatrix,
    PackedNibbles,
    QuantizedLayer,
    float4,
    integer_layout,
    power_of_two,
    unpack_dense,
    unpack_nibbles,
    unpack_words,
)
from .method import FLOATS, Stored, group_columns, refuse
from .settings import Flag, GroupSize, SchemeSettings, WeightSettings, read_settings

__all__ = [
    "FLOATS",
    "CodeLayout",
    "Entry",
    "Flag",
    "GroupSize",
    "GroupedMatrix",
    "PackedNibbles",
    "QuantizedLayer",
    "SchemeSettings",
    "Stored",
    "WeightRows",
    "WeightSettings",
    "float4",
    "group_columns",
    "integer_layout",
    "power_of_two",
    "read_settings",
    "refuse",
    "unpack_dense",
    "unpack_nibbles",
    "unpack_words",
]
