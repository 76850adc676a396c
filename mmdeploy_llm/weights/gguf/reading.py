"""Shows the tensors of GGUF files as the entries of a checkpoint: under the names of transformers'
models, dequantised, without the converter's changes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout
from mmdeploy_llm.weights.tensor_file import WeightRows

from .codes import LAYOUTS, coded_rows
from .entries import EntryFile
from .header import Header, StoredTensor
from .metadata import Metadata, num_layers
from .names import HasKey, Key, Names
from .order import Order
from .rows import TensorRows
from .tables import Change, TextModel

LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(.+)")
MAX_ENTRIES = 500_000
# Factors of rotary frequencies, which the config describes.
NOT_WEIGHTS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Tells where the values of an entry come from.

    shape: of the entry.
    first_row: the first row of the entry in the stored tensor, all but its last axis as one.
    rows: their order, where the converter changed it.
    undo: what is done with rows [n, k] after they were read, one after the other.
    """

    tensor: StoredTensor
    shape: tuple[int, ...]
    first_row: int = 0
    rows: Order | None = None
    undo: tuple[Callable[[Tensor], Tensor], ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.type.dtype or torch.float32


class BlockFile(EntryFile[TensorSource]):
    """Weights in the types of ggml, which GGUF and older files have."""

    def _weight(self, source: TensorSource) -> WeightRows:
        return _Weight(source, self._rows)

    def layout(self, key: str) -> CodeLayout | None:
        """Returns the layout of a weight that can stay in few bits; None where it cannot."""
        source = self._sources[key]
        is_matrix = len(source.shape) == 2 and source.shape[1] == source.tensor.shape[-1]
        return LAYOUTS.get(source.tensor.type.name) if is_matrix and not source.undo else None

    def read_coded(self, key: str, out: Tensor | None = None) -> CodedWeight:
        """Reads a weight that has a layout. out: not used, since blocks are taken apart first."""
        del out
        source = self._sources[key]
        (n, k), first = source.shape, source.first_row
        data = self._rows.read_bytes(source.tensor, first, first + n)
        weight = coded_rows(source.tensor.type.name, torch.from_numpy(data), k)
        return weight if source.rows is None else weight.rows(source.rows.places(0, n))


class GGUFFile(BlockFile):
    """The weights in the GGUF files of one model."""

    def __init__(self, header: Header, model: TextModel, has_key: HasKey) -> None:
        """model: of the file's architecture. has_key: see names.py. Raises CheckpointError for a
        tensor that the model does not have."""
        super().__init__(header, dict(_sources(header, model, has_key)))


class _Weight:
    """The rows of one entry; see WeightRows."""

    def __init__(self, source: TensorSource, rows: TensorRows) -> None:
        self._source = source
        self._rows = rows

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows start .. end (first axis) of the entry."""
        source = self._source
        if source.rows is None:
            values = self._stored(start, end)
        else:
            places = source.rows.places(start, end)
            low = int(places.min())
            values = self._stored(low, int(places.max()) + 1)[places - low]
        for step in source.undo:
            values = step(values)
        return values.view(end - start, *source.shape[1:])

    def _stored(self, start: int, end: int) -> Tensor:
        """Returns rows start .. end of the entry, [n, k], in the order in which they are stored."""
        source, stored = self._source, self._source.tensor.shape
        if len(stored) == 1 or len(source.shape) == 1:  # few values: rows are no rows of both
            whole = self._rows.read(source.tensor, 0, math.prod(stored[:-1]))
            return whole.view(source.shape[0], -1)[start:end]
        inner = math.prod(source.shape[1:-1])  # stored rows of one row of the entry
        first = source.first_row
        values = self._rows.read(source.tensor, first + start * inner, first + end * inner)
        return values.view(end - start, -1)


def _reordered(order: Order, values: Tensor) -> Tensor:
    return values[:, order.places(0, values.shape[1])]


def _logarithm(values: Tensor) -> Tensor:
    return torch.log(-values.float()).to(values.dtype)


def _reduced(number: float, values: Tensor) -> Tensor:
    return (values.float() - number).to(values.dtype)


def _sources(
    header: Header, model: TextModel, has_key: HasKey
) -> Iterator[tuple[str, TensorSource]]:
    """Yields key and source of every entry."""
    metadata = Metadata(header)
    names = Names(header.architecture, model.names, has_key)
    last = num_layers(metadata) if model.has_extra_layers else None
    unknown: list[str] = []
    num_entries = 0
    for name, tensor in header.tensors.items():
        layer = LAYER_NAME.fullmatch(name)
        if name in NOT_WEIGHTS or (last and layer is not None and int(layer[1]) >= last):
            continue
        key = names.key(name)
        if key is None:
            unknown.append(name)
            continue
        change = _change(model.changes, name if layer is None else layer[2])
        found = _entries(metadata, key, tensor, change)
        num_entries += len(found)
        if num_entries > MAX_ENTRIES:
            raise CheckpointError(
                f"{header.paths[0]} holds more than {MAX_ENTRIES} weights; allowed: {MAX_ENTRIES}"
            )
        yield from found.items()
    if unknown:
        raise CheckpointError(
            f"{header.paths[0]} holds {len(unknown)} tensors that models of its architecture "
            f"({header.architecture}) do not have here: {', '.join(map(ascii, unknown[:10]))}. "
            "Use the model's safetensors files"
        )


def _change(changes: Mapping[str, Change], name: str) -> Change:
    """Returns the change of the tensors of a name."""
    found = (change for pattern, change in changes.items() if fnmatchcase(name, pattern))
    return next(found, Change())


def _entries(
    metadata: Metadata, key: Key, tensor: StoredTensor, change: Change
) -> Mapping[str, TensorSource]:
    """Returns the entries that one stored tensor holds."""
    if not key.is_stack:
        return {key.text: _source(metadata, tensor, change)}
    num_experts, num_rows, size = metadata.shape(tensor.name, 3)
    if num_experts > MAX_ENTRIES:
        raise CheckpointError(
            f"{tensor.name} of {metadata.header.paths[0]} holds {num_experts} experts"
        )
    return {
        key.text.format(expert): TensorSource(
            tensor=tensor, shape=(num_rows, size), first_row=expert * num_rows
        )
        for expert in range(num_experts)
    }


def _source(metadata: Metadata, tensor: StoredTensor, change: Change) -> TensorSource:
    shape, axis = tensor.shape, change.new_axis
    if axis is not None and len(shape) < axis + 2:
        shape = (*shape[:axis], 1, *shape[axis:])
    if change.is_flat:
        shape = (math.prod(shape),)
    columns = None if change.columns is None else change.columns(metadata, tensor)
    undo: list[Callable[[Tensor], Tensor]] = []
    if columns is not None:
        undo.append(partial(_reordered, columns))
    if change.is_log:
        undo.append(_logarithm)
    if change.added:
        undo.append(partial(_reduced, change.added))
    return TensorSource(
        tensor=tensor,
        shape=shape,
        rows=None if change.rows is None else change.rows(metadata, tensor),
        undo=tuple(undo),
    )
