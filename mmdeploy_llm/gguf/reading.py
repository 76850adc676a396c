"""Shows the tensors of GGUF files as the entries of a checkpoint: under the names of transformers'
models, dequantised, without the converter's changes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels.coded import CodedWeight, CodeLayout
from mmdeploy_llm.tensor_file import WeightRows

from .codes import LAYOUTS, coded_rows
from .entries import EntryFile
from .families import NOT_WEIGHTS, Family, family_of
from .header import Header, StoredTensor
from .metadata import MAX_HEAD_DIM, Metadata, num_layers
from .order import Order, halves_to_pairs, pairs_to_halves, tiled_heads
from .rows import TensorRows

LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(.+)")
OUTER_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")
MAX_ENTRIES = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Tells where the values of an entry come from.

    first_row: the first row of the entry in the stored tensor, all but its last axis as one.
    shape: of the entry.
    rows, columns: their order, where the converter changed it.
    subtracts: what the converter added to every value. is_log: it stored -exp(value).
    """

    tensor: StoredTensor
    first_row: int
    shape: tuple[int, ...]
    rows: Order | None = None
    columns: Order | None = None
    subtracts: float = 0.0
    is_log: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.type.dtype or torch.float32


class GGUFFile(EntryFile[_Source]):
    """The weights in the GGUF files of one model."""

    def __init__(self, header: Header) -> None:
        """Raises ModelNotSupportedError for an unknown architecture, CheckpointError for a tensor
        that this architecture does not have."""
        super().__init__(header, dict(_sources(header)))

    def _weight(self, source: _Source) -> WeightRows:
        return _Weight(source, self._rows)

    def layout(self, key: str) -> CodeLayout | None:
        """Returns the layout of a weight that can stay in few bits; None where it cannot."""
        source = self._sources[key]
        is_changed = source.columns is not None or source.subtracts or source.is_log
        is_matrix = len(source.shape) == 2 and source.shape[1] == source.tensor.shape[-1]
        return LAYOUTS.get(source.tensor.type.name) if is_matrix and not is_changed else None

    def read_coded(self, key: str, out: Tensor | None = None) -> CodedWeight:
        """Reads a weight that has a layout. out: not used, since blocks are taken apart first."""
        del out
        source = self._sources[key]
        (n, k), first = source.shape, source.first_row
        data = self._rows.read_bytes(source.tensor, first, first + n)
        weight = coded_rows(source.tensor.type.name, torch.from_numpy(data), k)
        return weight if source.rows is None else weight.rows(source.rows.places(0, n))


class _Weight:
    """The rows of one entry; see WeightRows."""

    def __init__(self, source: _Source, rows: TensorRows) -> None:
        self._source = source
        self._rows = rows

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows start .. end (first axis) of the entry."""
        source = self._source
        if len(source.tensor.shape) == 1 or len(source.shape) == 1:  # few values
            num_rows = math.prod(source.tensor.shape[:-1])
            values = self._rows.read(source.tensor, 0, num_rows).view(source.shape)
            places = torch.arange(start, end)
            values = values[places if source.rows is None else source.rows.places(start, end)]
        elif source.rows is None:
            first, inner = source.first_row, math.prod(source.shape[1:-1])
            values = self._rows.read(source.tensor, first + start * inner, first + end * inner)
        else:
            places = source.rows.places(start, end)
            low, high = int(places.min()), int(places.max()) + 1
            values = self._rows.read(source.tensor, low, high)[places - low]
        if source.columns is not None:
            values = values[:, source.columns.places(0, values.shape[1])]
        if source.is_log:
            values = torch.log(-values.float()).to(values.dtype)
        if source.subtracts:
            values = (values.float() - source.subtracts).to(values.dtype)
        return values.view(end - start, *source.shape[1:])


def _sources(header: Header) -> Iterator[tuple[str, _Source]]:
    """Yields key and source of every entry."""
    family, metadata = family_of(header.architecture), Metadata(header)
    unknown: list[str] = []
    num_entries = 0
    for name, tensor in header.tensors.items():
        if name in NOT_WEIGHTS or _is_extra(family, metadata, name):
            continue
        found = dict(_entries(family, metadata, name, tensor))
        if not found:
            unknown.append(name)
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


def _entries(
    family: Family, metadata: Metadata, name: str, tensor: StoredTensor
) -> Iterator[tuple[str, _Source]]:
    """Yields the entries that one stored tensor holds; none for a name that is not known."""
    outer = OUTER_NAME.fullmatch(name)
    if outer is not None and outer[1] in family.outer:
        key = f"{family.outer[outer[1]]}.{outer[2]}"
        yield key, _source(family, metadata, outer[1], tensor)
    layer = LAYER_NAME.fullmatch(name)
    if layer is None:
        return
    prefix = f"model.layers.{int(layer[1])}"
    leaf, _, suffix = layer[2].rpartition(".")
    if layer[2] in family.whole:
        yield f"{prefix}.{family.whole[layer[2]]}", _source(family, metadata, layer[2], tensor)
    elif suffix not in ("weight", "bias"):
        return
    elif leaf in family.layer:
        yield f"{prefix}.{family.layer[leaf]}.{suffix}", _source(family, metadata, leaf, tensor)
    elif leaf in family.experts and suffix == "weight":
        num_experts, num_rows, size = metadata.shape(name, 3)
        if num_experts > MAX_ENTRIES:
            raise CheckpointError(
                f"{name} of {metadata.header.paths[0]} holds {num_experts} experts"
            )
        for expert in range(num_experts):
            key = f"{prefix}.{family.experts[leaf].format(expert)}.weight"
            shape = (num_rows, size)
            yield key, _Source(tensor=tensor, first_row=expert * num_rows, shape=shape)


def _source(family: Family, metadata: Metadata, leaf: str, tensor: StoredTensor) -> _Source:
    shape = tensor.shape
    axis = None if tensor.name.endswith(f"{leaf}.bias") else family.new_axes.get(leaf)
    if axis is not None and len(shape) < axis + 2:
        shape = (*shape[:axis], 1, *shape[axis:])
    if leaf in family.flat:
        shape = (math.prod(shape),)
    rows = columns = None
    if leaf in family.permuted:
        rows = _halves(metadata, tensor, family.permuted[leaf])
    elif leaf in family.halved and metadata.has("rope.dimension_sections"):
        rows = _pairs(metadata, tensor, family.halved[leaf])
    elif leaf in family.tiled or leaf == family.tiled_columns:
        heads = _tiled(metadata, tensor, family.tiled.get(leaf))
        rows, columns = (None, heads) if leaf == family.tiled_columns else (heads, None)
    is_shifted = family.adds_one and leaf.endswith("norm") and leaf not in family.plain_norms
    return _Source(
        tensor=tensor,
        first_row=0,
        shape=shape,
        rows=rows,
        columns=columns,
        subtracts=1.0 if is_shifted else 0.0,
        is_log=leaf in family.logs,
    )


def _halves(metadata: Metadata, tensor: StoredTensor, key: str) -> Order:
    heads = metadata.most(key, metadata.whole("attention.head_count"))
    num_rows = tensor.shape[0]
    if num_rows % (2 * heads):
        raise CheckpointError(
            f"{tensor.name} of {metadata.header.paths[0]} has {num_rows} rows, which are not "
            f"{heads} heads of an even size"
        )
    return halves_to_pairs(num_rows, heads)


def _pairs(metadata: Metadata, tensor: StoredTensor, key: str) -> Order:
    heads = metadata.most(key, metadata.whole("attention.head_count"))
    num_rows = tensor.shape[0]
    size = num_rows // heads
    rotary_dim = metadata.whole("rope.dimension_count", max(1, size), high=MAX_HEAD_DIM)
    if num_rows % heads or rotary_dim > size or rotary_dim % 2:
        raise CheckpointError(
            f"{tensor.name} of {metadata.header.paths[0]} has {num_rows} rows, which are not "
            f"{heads} heads whose first {rotary_dim} rows are pairs"
        )
    return pairs_to_halves(size, rotary_dim)


def _tiled(metadata: Metadata, tensor: StoredTensor, kind: str | None) -> Order:
    """Returns the order of the value heads in a tensor of Qwen3.5. kind: see Family.tiled; None:
    columns of values. Raises CheckpointError where the sizes do not fit."""
    num_keys = metadata.whole("ssm.group_count")
    num_values = metadata.whole("ssm.time_step_rank")
    size = metadata.whole("ssm.inner_size") // num_values
    length = tensor.shape[-1] if kind is None else tensor.shape[0]
    offset = 2 * num_keys * metadata.whole("ssm.state_size") if kind == "after keys" else 0
    size = 1 if kind == "heads" else size
    if size < 1 or num_values % num_keys or length != offset + num_values * size:
        raise CheckpointError(
            f"{tensor.name} of {metadata.header.paths[0]} has the shape {list(tensor.shape)}, "
            f"which does not fit {num_values} value heads of {num_keys} key heads"
        )
    return tiled_heads(num_keys, num_values, size, offset)


def _is_extra(family: Family, metadata: Metadata, name: str) -> bool:
    """Whether a tensor belongs to a layer that predicts further tokens, which is not used."""
    layer = LAYER_NAME.fullmatch(name)
    if not family.has_extra_layers or layer is None:
        return False
    return int(layer[1]) >= num_layers(metadata)
