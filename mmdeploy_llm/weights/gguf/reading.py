"""Shows the tensors of GGUF files as the entries of a checkpoint: under the names of transformers'
models, dequantised, without the converter's changes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.files import Entry
from mmdeploy_llm.weights.quantized.reading import copy_rows

from .facts import Facts
from .families import EXPERTS, NOT_WEIGHTS, Family, family_of
from .header import Header, StoredTensor
from .rows import TensorRows

LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(.+)\.(weight|bias)")
OUTER_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")
MAX_ENTRIES = 500_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Tells where the values of an entry come from.

    first_row: the first row of the entry in the stored tensor, all but its last axis as one.
    shape: of the entry.
    num_heads: of a tensor whose rows were reordered within each head; None: they were not.
    subtracts: what the converter added to every value.
    """

    tensor: StoredTensor
    first_row: int
    shape: tuple[int, ...]
    num_heads: int | None = None
    subtracts: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.type.dtype or torch.float32


class GGUFFile:
    """The weights in the GGUF files of one model, used as a context manager; see TensorFile."""

    def __init__(self, header: Header) -> None:
        """Raises ModelNotSupportedError for an unknown architecture, CheckpointError for a tensor
        that this architecture does not have."""
        self.path = header.paths[0]
        self._sources = dict(_sources(header))
        self.entries = {
            key: Entry(dtype=source.dtype, shape=source.shape, offset=0)
            for key, source in self._sources.items()
        }
        self._rows = TensorRows(header.paths)

    def __enter__(self) -> GGUFFile:
        self._rows.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._rows.__exit__(kind, error, trace)

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile. first_value: the first one of a row."""
        source = self._sources[key]
        first, rest = divmod(first_value, math.prod(source.shape[1:]))
        assert rest == 0, "a tensor is read by whole rows"
        weight = _Weight(source, self._rows)
        copy_rows(weight, source.shape, first, out, transpose=transpose)


class _Weight:
    """The rows of one entry; see WeightRows."""

    def __init__(self, source: _Source, rows: TensorRows) -> None:
        self._source = source
        self._rows = rows

    def rows(self, start: int, end: int) -> Tensor:
        """Returns rows start .. end (first axis) of the entry."""
        source = self._source
        if len(source.tensor.shape) == 1:  # few values
            values = self._rows.read(source.tensor, 0, 1).view(source.shape)
            values = values if source.num_heads is None else values[self._places(0, len(values))]
            values = values[start:end]
        elif source.num_heads is None:
            first = source.first_row
            values = self._rows.read(source.tensor, first + start, first + end)
        else:
            places = self._places(start, end)
            low, high = int(places.min()), int(places.max()) + 1
            values = self._rows.read(source.tensor, low, high)[places - low]
        if source.subtracts:
            values = (values.float() - source.subtracts).to(values.dtype)
        return values.view(end - start, *source.shape[1:])

    def _places(self, start: int, end: int) -> Tensor:
        """Returns where rows start .. end of the entry are stored. A head of 2 n rows is stored as
        0, n, 1, n + 1, ..."""
        assert self._source.num_heads is not None
        size = self._source.shape[0] // self._source.num_heads
        row = torch.arange(start, end)
        head, within = row // size, row % size
        return head * size + within % (size // 2) * 2 + within // (size // 2)


def _sources(header: Header) -> Iterator[tuple[str, _Source]]:
    """Yields key and source of every entry."""
    family, facts = family_of(header.architecture), Facts(header)
    unknown: list[str] = []
    num_entries = 0
    for name, tensor in header.tensors.items():
        if name in NOT_WEIGHTS:
            continue
        found = dict(_entries(family, facts, name, tensor))
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
    family: Family, facts: Facts, name: str, tensor: StoredTensor
) -> Iterator[tuple[str, _Source]]:
    """Yields the entries that one stored tensor holds; none for a name that is not known."""
    outer = OUTER_NAME.fullmatch(name)
    if outer is not None and outer[1] in family.outer:
        key = f"{family.outer[outer[1]]}.{outer[2]}"
        yield key, _source(family, facts, outer[1], tensor)
    layer = LAYER_NAME.fullmatch(name)
    if layer is None:
        return
    number, leaf, suffix = layer.groups()
    prefix = f"model.layers.{int(number)}"
    if leaf in family.layer:
        yield f"{prefix}.{family.layer[leaf]}.{suffix}", _source(family, facts, leaf, tensor)
    elif family.has_experts and leaf in EXPERTS and suffix == "weight":
        num_experts, num_rows, size = facts.shape(name, 3)
        if num_experts > MAX_ENTRIES:
            raise CheckpointError(f"{name} of {facts.header.paths[0]} holds {num_experts} experts")
        for expert in range(num_experts):
            key = f"{prefix}.mlp.experts.{expert}.{EXPERTS[leaf]}.weight"
            shape = (num_rows, size)
            yield key, _Source(tensor=tensor, first_row=expert * num_rows, shape=shape)


def _source(family: Family, facts: Facts, leaf: str, tensor: StoredTensor) -> _Source:
    shape = tensor.shape
    if leaf in family.new_axes and len(shape) < family.new_axes[leaf] + 2:
        axis = family.new_axes[leaf]
        shape = (*shape[:axis], 1, *shape[axis:])
    num_heads = None
    if leaf in family.permuted:
        heads = facts.whole("attention.head_count")
        num_heads = facts.whole(family.permuted[leaf], heads)
        if shape[0] % (2 * num_heads):
            raise CheckpointError(
                f"{tensor.name} of {facts.header.paths[0]} has {shape[0]} rows, which are not "
                f"{num_heads} heads of an even size"
            )
    subtracts = 1.0 if family.adds_one and leaf.endswith("norm") else 0.0
    return _Source(
        tensor=tensor, first_row=0, shape=shape, num_heads=num_heads, subtracts=subtracts
    )
