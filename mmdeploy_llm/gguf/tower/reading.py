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
from mmdeploy_llm.gguf.entries import EntryFile
from mmdeploy_llm.gguf.header import Header, StoredTensor
from mmdeploy_llm.gguf.rows import TensorRows
from mmdeploy_llm.tensor_file import WeightRows

from .names import Tower, tower_of

LAYER_NAME = re.compile(r"v\.blk\.(\d{1,5})\.(.+)")
TAP_NAME = re.compile(r"v\.deepstack\.(\d{1,5})\.(norm|fc1|fc2)\.(weight|bias)")
TAP_NAMES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
PATCHES = "v.patch_embd.weight"
SECOND_FRAME = f"{PATCHES}.1"
SOUND = re.compile(r"(mm\.)?a\.")  # begins the names of an encoder of sounds
BOUNDS = ("input_max", "input_min", "output_max", "output_min")
HEADS = ("attn_q", "attn_k", "attn_v")


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

    def __init__(self, header: Header) -> None:
        """Raises CheckpointError for an unknown tower, and for a tensor that it does not have."""
        super().__init__(header, _sources(header))

    def _weight(self, source: _Source) -> WeightRows:
        return _Whole(source.read(self._rows).view(source.shape or (1,)))


class _Whole:
    """The rows of a tensor in memory; see WeightRows."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def rows(self, start: int, end: int) -> Tensor:
        return self._values[start:end]


def _sources(header: Header) -> Mapping[str, _Source]:
    """Returns the source of every entry. Raises CheckpointError for names that are not known."""
    tower, taps = tower_of(header), _taps(header)
    names = [name for name in header.tensors if not (tower.has_sounds and SOUND.match(name))]
    keys = {name: _key(tower, taps, name) for name in names}
    unknown = [name for name, key in keys.items() if key is None]
    if unknown:
        raise CheckpointError(
            f"{header.paths[0]} holds {len(unknown)} tensors that vision towers of its kind do not "
            f"have here: {', '.join(map(ascii, unknown[:10]))}. Use the model's safetensors files"
        )
    grouped: dict[str, list[StoredTensor]] = {}
    for name in sorted(keys, key=_place):
        grouped.setdefault(str(keys[name]), []).append(header.tensors[name])
    return {key: _source(header, tower, tensors) for key, tensors in grouped.items()}


def _place(name: str) -> tuple[int, str]:
    """Orders queries before keys before values, and the first frame before the second."""
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    return (HEADS.index(leaf) if leaf in HEADS else 0, name)


def _taps(header: Header) -> Mapping[int, int]:
    """Returns the layers whose features are tapped, by their numbers in order."""
    matches = map(TAP_NAME.fullmatch, header.tensors)
    layers = sorted({int(match[1]) for match in matches if match is not None})
    return {layer: number for number, layer in enumerate(layers)}


def _key(tower: Tower, taps: Mapping[int, int], name: str) -> str | None:
    """Returns the key of the entry that a tensor is a part of; None for an unknown name."""
    if name == SECOND_FRAME and tower.has_frames:
        name = PATCHES
    if name in tower.whole:
        return tower.whole[name]
    leaf, _, suffix = name.rpartition(".")
    layer = LAYER_NAME.fullmatch(leaf)
    if layer is not None and layer[2] in tower.clipped and suffix in ("weight", *BOUNDS):
        inner = "linear.weight" if suffix == "weight" else suffix
        return f"{tower.layers}.{int(layer[1])}.{tower.clipped[layer[2]]}.{inner}"
    if suffix not in ("weight", "bias"):
        return None
    if leaf in tower.outer:
        return f"{tower.outer[leaf]}.{suffix}"
    tap = TAP_NAME.fullmatch(name)
    if tap is not None and tower.has_taps:
        prefix = f"model.visual.deepstack_merger_list.{taps[int(tap[1])]}"
        return f"{prefix}.{TAP_NAMES[tap[2]]}.{suffix}"
    if layer is None:
        return None
    prefix, inner = f"{tower.layers}.{int(layer[1])}", layer[2]
    if f"{inner}.{suffix}" in tower.whole:
        return f"{prefix}.{tower.whole[f'{inner}.{suffix}']}"
    if tower.qkv and inner in HEADS:
        return f"{prefix}.{tower.qkv}.{suffix}"
    return f"{prefix}.{tower.layer[inner]}.{suffix}" if inner in tower.layer else None


def _source(header: Header, tower: Tower, tensors: Sequence[StoredTensor]) -> _Source:
    """Raises CheckpointError for tensors that cannot be joined."""
    first = tensors[0]
    name, shape = first.name, first.shape
    if name == PATCHES:
        if len(shape) != 4 or len({tensor.shape for tensor in tensors}) != 1:
            raise _unfit(header, tensors)
        if tower.has_rows:
            return _Source(tensors=(first,), shape=(shape[0], math.prod(shape[1:])), join="pixels")
        if tower.has_frames:
            if len(tensors) != 2:
                raise _unfit(header, tensors)
            shape = (*shape[:2], 2, *shape[2:])
            return _Source(tensors=tuple(tensors), shape=shape, join="frames")
    if len({tensor.shape[1:] for tensor in tensors}) != 1:
        raise _unfit(header, tensors)
    shape = (sum(tensor.shape[0] for tensor in tensors), *shape[1:])
    if name.rpartition(".")[2] in BOUNDS:
        if shape != (1,):
            raise _unfit(header, tensors)
        shape = ()
    num_axes = tower.new_axes.get(name, 0)
    while len(shape) < num_axes:
        shape = (1, *shape)
    return _Source(tensors=tuple(tensors), shape=shape)


def _unfit(header: Header, tensors: Sequence[StoredTensor]) -> CheckpointError:
    found = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in tensors)
    return CheckpointError(
        f"tensors of {header.paths[0]} do not fit together: {found}; download the file again"
    )
