"""Shows the quantised layers of a checkpoint's files as tensors of floats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout
from mmdeploy_llm.tensor_file import Entry, TensorFile, WeightRows, copy_rows
from mmdeploy_llm.weights.files import LOADABLE, SafetensorsFile

from .autoround import autoround_layers
from .awq import awq_layers
from .compressed import compressed_layers
from .fp8 import fp8_layers
from .gptq import gptq_layers
from .layer import GroupedMatrix, QuantizedLayer
from .method import Layers, Stored
from .mxfp4 import mxfp4_layers
from .settings import quantization_settings

METHODS: Mapping[str, Layers] = MappingProxyType(
    {
        "auto-round": autoround_layers,
        "awq": awq_layers,
        "compressed-tensors": compressed_layers,
        "fp8": fp8_layers,
        "gptq": gptq_layers,
        "mxfp4": mxfp4_layers,
    }
)
# Scales of activations and of the KV cache: the engine has its own.
IGNORED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".activation_scale",
    "_activation_scale",
    "_scale_inv",  # of a weight that transformers left in floats: blocks did not divide it
    ".k_scale",
    ".v_scale",
)


def readable_files(files: Sequence[SafetensorsFile], config: Any) -> Sequence[TensorFile]:
    """Returns files whose entries are ready to load: `files` themselves if they are not quantised,
    else one more in front, with the quantised layers.

    config: transformers' config. Raises CheckpointError for a method or a scheme that is not known,
    naming it and the layer.
    """
    settings = quantization_settings(config)
    entries = (entry for file in files for entry in file.entries.values())
    if settings is None:
        return files
    method = str(settings.get("quant_method", "compressed-tensors"))
    if method not in METHODS:
        raise CheckpointError(
            f"quantization_config in config.json says that {method!r} quantised the weights, "
            f"which is not supported; supported: {', '.join(METHODS)}. Load the model that it was "
            'made from, with quantization="int8wo" or "int4" if you like'
        )
    if all(entry.dtype in LOADABLE for entry in entries):
        return files  # a config may still name the method after the weights were dequantised
    owners = {key: file for file in files for key in file.entries}
    stored = Stored({key: file.entries[key] for key, file in owners.items()}, owners)
    layers = tuple(METHODS[method](settings, stored))
    used = {key for layer in layers for key in layer.parts.values()}
    used.update(layer.key for layer in layers)  # GPTQModel leaves an output head in floats beside
    used.update(key for key in owners if key.endswith(IGNORED))
    plain = [_Selection(file, used) for file in files]
    return [QuantizedFile(files[0].path, layers, stored), *plain]


class _Selection:
    """A file without the tensors that were shown otherwise."""

    def __init__(self, file: SafetensorsFile, used: Iterable[str]) -> None:
        self._file = file
        self.path = file.path
        hidden = set(used)
        self.entries = {key: entry for key, entry in file.entries.items() if key not in hidden}

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile."""
        self._file.read_into(key, out, first_value=first_value, transpose=transpose)


class QuantizedFile:
    """The quantised layers of a checkpoint as a file of floats; dequantises what is read."""

    def __init__(self, path: Path, layers: Sequence[QuantizedLayer], stored: Stored) -> None:
        self.path = path
        self._layers = {layer.key: layer for layer in layers}
        self._stored = stored
        self.entries = {
            layer.key: Entry(dtype=layer.dtype, shape=layer.shape, offset=0) for layer in layers
        }

    def layout(self, key: str) -> CodeLayout | None:
        """Returns the layout of a weight that can stay in few bits; None where it cannot."""
        return self._layers[key].layout

    def read_coded(self, key: str, out: Tensor | None = None) -> CodedWeight:
        """Reads a weight that has a layout. out: [n, U] int32; becomes its units where the file
        stores these as words of as many codes."""
        layer = self._layers[key]
        matrix = self._decoded(layer, out)
        assert layer.layout is not None
        assert isinstance(matrix, GroupedMatrix)
        return matrix.coded(layer.layout)

    def _decoded(self, layer: QuantizedLayer, out: Tensor | None = None) -> WeightRows:
        """out: memory for the codes, where they fit into it."""
        places = {"codes": out}
        return layer.decode(
            {role: self._stored.read(key, places.get(role)) for role, key in layer.parts.items()}
        )

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile. first_value: the first one of a row."""
        layer = self._layers[key]
        row_size = math.prod(layer.shape[1:])
        first, rest = divmod(first_value, row_size)
        assert rest == 0, "a quantised weight is read by whole rows"
        copy_rows(self._decoded(layer), layer.shape, first, out, transpose=transpose)
