"""Shows the quantised layers of a checkpoint's files as tensors of floats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mmdeploy_llm.errors import PluginContractError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.tensor_file import Entry, TensorFile, copy_rows

from .formats import DecodedWeight, FormatReader, format_of
from .layer import GroupedMatrix, QuantizedLayer
from .method import Stored
from .settings import quantization_settings


def readable_files(
    files: Sequence[SafetensorsFile], config: Any, plugins: PluginManager | None = None
) -> Sequence[TensorFile]:
    """Returns files whose entries are ready to load: `files` themselves if they are not quantised,
    else one more in front, with the quantised layers.

    config: transformers' config. plugins: None loads the installed ones where files are quantised.
    Raises CheckpointError for a method or a scheme that is not known, naming it and the layer.
    """
    settings = quantization_settings(config)
    if settings is None:
        return files
    plugins = PluginManager.load() if plugins is None else plugins
    spec = format_of(settings, plugins)
    owners = {key: file for file in files for key in file.entries}
    stored = Stored({key: file.entries[key] for key, file in owners.items()}, owners)
    reader = FormatReader(spec=spec, owner=plugins.described(spec), stored=stored)
    layers = reader.layers(plugins, settings)
    hidden = reader.hidden(layers)
    plain: list[TensorFile] = [Selection(file, hidden) for file in files]
    # A config may still name the method after the weights were dequantised.
    return [QuantizedFile(files[0].path, layers, reader), *plain] if layers else plain


class Selection:
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

    def __init__(self, path: Path, layers: Sequence[QuantizedLayer], reader: FormatReader) -> None:
        self.path = path
        self._layers = {layer.key: layer for layer in layers}
        self._reader = reader
        self.entries = {
            layer.key: Entry(dtype=layer.dtype, shape=layer.shape, offset=0) for layer in layers
        }

    def layout(self, key: str) -> CodeLayout | None:
        """Returns the layout of a weight that can stay in few bits; None where it cannot."""
        return self._layers[key].layout

    def stored_keys(self, key: str) -> Sequence[str]:
        """Returns the keys of the stored tensors of a weight."""
        return tuple(self._layers[key].parts.values())

    def decoded(self, key: str) -> DecodedWeight:
        """Reads and decodes a weight, whose rows are dequantised when they are asked for."""
        return self._reader.decoded(self._layers[key])

    def read_coded(self, key: str, out: Tensor | None = None) -> CodedWeight:
        """Reads a weight that has a layout. out: [n, U] int32; becomes its units where the file
        stores these as words of as many codes."""
        layer = self._layers[key]
        assert layer.layout is not None
        matrix = self._reader.decoded(layer, out).made
        if not isinstance(matrix, GroupedMatrix):
            raise PluginContractError(
                f"{self._reader.owner} gives {layer.name} a layout, but decodes it to a "
                f"{type(matrix).__name__}; it must be a GroupedMatrix, or the layout None"
            )
        weight: CodedWeight = self._reader.call(layer, matrix.coded, layer.layout)
        if (weight.n, weight.k) != layer.shape:
            raise PluginContractError(
                f"{self._reader.owner} decodes {layer.name} to codes {[weight.n, weight.k]}; they "
                f"must be {list(layer.shape)}"
            )
        return weight

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile. first_value: the first one of a row."""
        layer = self._layers[key]
        row_size = math.prod(layer.shape[1:])
        first, rest = divmod(first_value, row_size)
        assert rest == 0, "a quantised weight is read by whole rows"
        copy_rows(self.decoded(key), layer.shape, first, out, transpose=transpose)
