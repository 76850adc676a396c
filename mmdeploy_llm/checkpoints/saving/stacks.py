"""Shows stacks of experts as one matrix for each projection of each expert.

    experts.gate_up_proj [E, 2 I, S]   ->   experts.0.gate_proj.weight [I, S],
                                            experts.0.up_proj.weight [I, S], experts.1.gate_proj...

compressed-tensors has no form for stacks; these are the names that vLLM and llm-compressor use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.weights.files import SafetensorsFile
from mmdeploy_llm.weights.map import Target
from mmdeploy_llm.weights.tensor_file import Entry

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The matrix of an expert in a stack. key: the stack. index: the expert. rows: its rows of the
    expert's matrix [n, k]. is_swapped: whether the file stores [k, n]."""

    key: str
    index: int
    rows: slice
    n: int
    k: int
    is_swapped: bool


class Unstacked:
    """A file in whose entries the stacks of experts that are to be rounded are matrices, and all
    other tensors as they are."""

    def __init__(
        self, file: SafetensorsFile, model: Any, is_rounded: Callable[[str, Entry], bool]
    ) -> None:
        """model: says where tensors belong. is_rounded: whether a matrix will be rounded; stacks
        are divided if all of their matrices are."""
        self.path: Path = file.path
        self._file = file
        self._pieces: dict[str, Piece] = {}
        self.entries: dict[str, Entry] = {}
        for key, entry in file.entries.items():
            pieces = dict(pieces_of(model, key, entry))
            entries = {
                name: replace(entry, shape=(own.rows.stop - own.rows.start, own.k))
                for name, own in pieces.items()
            }
            if pieces and all(is_rounded(name, own) for name, own in entries.items()):
                self._pieces |= pieces
                self.entries |= entries
            else:
                self.entries[key] = entry

    def read_into(self, key: str, out: Tensor, *, first_value: int, transpose: bool) -> None:
        """See TensorFile. A matrix of a stack is read whole, not transposed."""
        own = self._pieces.get(key)
        if own is None:
            self._file.read_into(key, out, first_value=first_value, transpose=transpose)
            return
        assert not first_value
        assert not transpose
        start = own.index * own.n * own.k
        if own.is_swapped:
            whole = torch.empty(own.n, own.k, dtype=self._file.entries[own.key].dtype)
            self._file.read_into(own.key, whole, first_value=start, transpose=True)
            out.copy_(whole[own.rows])
        else:
            start += own.rows.start * own.k
            self._file.read_into(own.key, out, first_value=start, transpose=False)


def pieces_of(model: Any, key: str, entry: Entry) -> Iterator[tuple[str, Piece]]:
    """Yields the matrices of a stack, by the names under which the model knows them; nothing for
    other tensors, and for stacks whose matrices have no name of their own in this family."""
    targets: Sequence[Target] = model.weight_targets(key) or ()
    if len(entry.shape) != 3 or len(targets) != 1 or not _is_whole(targets[0]):
        return
    target = targets[0]
    path, _, own = target.name.rpartition(".")
    experts = model.get_submodule(path)
    if not isinstance(experts, Experts):
        return
    parts = {part: rows for part, (name, rows) in experts.expert_parts.items() if name == own}
    n, k = _matrix_shape(experts, own)
    is_swapped = entry.shape[1:] != (n, k) if target.transpose is None else target.transpose
    stem = _stem(model, key, target.name, parts)
    if stem is None or entry.shape[1:] != ((k, n) if is_swapped else (n, k)):
        return
    for index in range(entry.shape[0]):
        for part, rows in parts.items():
            span = slice(*(rows or slice(n)).indices(n))
            yield (
                f"{stem}.{index}.{part}{WEIGHT}",
                Piece(key=key, index=index, rows=span, n=n, k=k, is_swapped=is_swapped),
            )


def _matrix_shape(experts: Experts, name: str) -> tuple[int, int]:
    """Returns the shape [n, k] of an expert's matrix in a parameter, packed or not."""
    size, inner_size = experts.gate_up_proj.shape[-1], experts.down_proj.shape[-1]
    return (size, inner_size) if name == "down_proj" else (2 * inner_size, size)


def _is_whole(target: Target) -> bool:
    fields = (target.index, target.rows, target.source_index, target.source)
    return all(field is None for field in fields)


def _stem(model: Any, key: str, name: str, parts: Mapping[str, slice | None]) -> str | None:
    """Returns the name before the number of an expert; None where the model knows none."""
    parent = key.removesuffix(WEIGHT).rpartition(".")[0]
    for stem in (parent, f"{parent}.experts"):
        found = [
            tuple(model.weight_targets(f"{stem}.0.{part}{WEIGHT}") or ())
            == (Target(name=name, index=0, rows=rows),)
            for part, rows in parts.items()
        ]
        if all(found):
            return stem
    return None
