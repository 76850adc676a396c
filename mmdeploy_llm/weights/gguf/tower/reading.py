"""Shows the tensors of an mmproj file as the entries of a checkpoint: under the names of
transformers' models, dequantised, without the converter's changes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.gguf.entries import EntryFile
from mmdeploy_llm.weights.gguf.header import Header, StoredTensor
from mmdeploy_llm.weights.gguf.names import HasKey, Names
from mmdeploy_llm.weights.gguf.rows import TensorRows
from mmdeploy_llm.weights.gguf.tables import Tower
from mmdeploy_llm.weights.tensor_file import WeightRows

# Features of inner layers that the decoder gets too: GGUF has the numbers of these layers, where
# transformers counts them.
TAPPED = re.compile(r"v\.deepstack\.(\d{1,5})\..+")
PATCHES = "v.patch_embd.weight"
BOUNDS = ("input_max", "input_min", "output_max", "output_min")  # of a linear layer
PARTS = ("attn_q", "attn_k", "attn_v")  # in the order of rows of a matrix that holds all three


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The stored tensors that one entry is made of. shape: of the entry.

    join: "rows": they follow each other along the first axis; "frames": a third axis tells them
    apart; "pixels": the one tensor has its second axis, the channels, last in the entry.
    """

    tensors: tuple[StoredTensor, ...]
    shape: tuple[int, ...]
    join: Literal["rows", "frames", "pixels"] = "rows"

    @property
    def dtype(self) -> torch.dtype:
        kinds = {tensor.type.dtype or torch.float32 for tensor in self.tensors}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def read(self, rows: TensorRows) -> Tensor:
        """Returns all values."""
        parts = []
        for tensor in self.tensors:
            part = rows.read(tensor, 0, math.prod(tensor.shape[:-1]))
            parts.append(part.view(tensor.shape).to(self.dtype))
        if self.join == "frames":
            return torch.stack(parts, 2)
        if self.join == "pixels":
            return parts[0].permute(0, 2, 3, 1).reshape(self.shape)
        return torch.cat(parts).view(self.shape)


class TowerFile(EntryFile[_Source]):
    """The weights in an mmproj file. Towers are small, and a matrix is read as a whole."""

    def __init__(self, header: Header, tower: Tower, has_key: HasKey) -> None:
        """has_key: see names.py. Raises CheckpointError for a tensor that the model does not
        have."""
        super().__init__(header, _sources(header, tower, has_key))

    def _weight(self, source: _Source) -> WeightRows:
        return _Whole(source.read(self._rows).view(source.shape or (1,)))


class _Whole:
    """The rows of a tensor in memory; see WeightRows."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def rows(self, start: int, end: int) -> Tensor:
        return self._values[start:end]


def _sources(header: Header, tower: Tower, has_key: HasKey) -> Mapping[str, _Source]:
    """Returns the source of every entry. Raises CheckpointError for names that are not known."""
    names, numbers = Names(header.architecture, tower.names, has_key), _tapped(header)
    grouped: dict[str, list[StoredTensor]] = {}
    unknown: list[str] = []
    for name in sorted(header.tensors, key=_place):
        if name.startswith(tower.ignored):
            continue
        found = names.key(name, numbers.get(name))
        if found is None:
            unknown.append(name)
        else:
            grouped.setdefault(found.text, []).append(header.tensors[name])
    if unknown:
        raise CheckpointError(
            f"{header.paths[0]} holds {len(unknown)} tensors that vision towers of its kind do not "
            f"have here: {', '.join(map(ascii, unknown[:10]))}. Use the model's safetensors files"
        )
    return {key: _source(header, tower, parts) for key, parts in grouped.items()}


def _place(name: str) -> tuple[int, str]:
    """Orders queries before keys before values, and the first frame before the second."""
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    return (PARTS.index(leaf) if leaf in PARTS else 0, name)


def _tapped(header: Header) -> Mapping[str, int]:
    """Returns the place of a tapped layer among them, by the names of its tensors."""
    found = {name: int(match[1]) for name in header.tensors if (match := TAPPED.fullmatch(name))}
    layers = sorted(set(found.values()))
    return {name: layers.index(layer) for name, layer in found.items()}


def _source(header: Header, tower: Tower, tensors: Sequence[StoredTensor]) -> _Source:
    """Raises CheckpointError for tensors that cannot be joined."""
    first = tensors[0]
    name, shape = first.name, first.shape
    if name == PATCHES and tower.patches:
        num_parts = 2 if tower.patches == "frames" else 1
        if len(shape) != 4 or [tensor.shape for tensor in tensors] != [shape] * num_parts:
            raise _unfit(header, tensors)
        if tower.patches == "pixels":
            return _Source(tensors=(first,), shape=(shape[0], math.prod(shape[1:])), join="pixels")
        shape = (*shape[:2], 2, *shape[2:])
        return _Source(tensors=tuple(tensors), shape=shape, join="frames")
    if len({tensor.shape[1:] for tensor in tensors}) != 1:
        raise _unfit(header, tensors)
    shape = (sum(tensor.shape[0] for tensor in tensors), *shape[1:])
    if name.rpartition(".")[2] in BOUNDS:
        if shape != (1,):
            raise _unfit(header, tensors)
        shape = ()
    missing = tower.num_axes.get(name, 0) - len(shape)
    return _Source(tensors=tuple(tensors), shape=(*(1,) * missing, *shape))


def _unfit(header: Header, tensors: Sequence[StoredTensor]) -> CheckpointError:
    found = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
    return CheckpointError(
        f"tensors of {header.paths[0]} do not fit together: {found}; download the file again"
    )
