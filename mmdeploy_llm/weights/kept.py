"""Keeps weights in the few bits in which their checkpoint stores them, where the kernels multiply
by such weights: no copy of them in floats is ever made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmdeploy_llm.kernels.coded import (
    Bits,
    CodedWeight,
    CodeLayout,
    common_layout,
    joined,
    num_units,
)

from .gguf import GGUFFile
from .quantized import QuantizedFile
from .shard import Read

CODED_FILES = (QuantizedFile, GGUFFile)
# Whether the kernels multiply by weights of these bits, columns of a group, and columns.
CanKeep = Callable[[Bits, int, int], bool]


@runtime_checkable
class CodedHolder(Protocol):
    """A module whose weights may be in few bits."""

    def can_hold_coded(self, name: str) -> bool:
        """Whether `hold_coded` takes this parameter."""
        ...

    def hold_coded(self, name: str, weight: CodedWeight) -> None:
        """Takes the values of a parameter [n, k], or of a stack of these, one below the other."""
        ...


def kept_reads(
    model: nn.Module, reads: Iterable[Read], can_keep: CanKeep
) -> Mapping[str, Sequence[Read]]:
    """Returns the parameters that can stay in few bits, with their reads in the order of rows: all
    values must come from weights that have a layout, and the module must take them, which has all
    of those that it can take in few bits or none."""
    by_name: dict[str, list[Read]] = defaultdict(list)
    for read in reads:
        by_name[read.name].append(read)
    found = {
        name: sorted(own, key=lambda read: read.start)
        for name, own in by_name.items()
        if _can_hold(model, name) and _have_layouts(own, can_keep)
    }
    return {name: own for name, own in found.items() if _siblings(model, name) <= found.keys()}


def _siblings(model: nn.Module, name: str) -> set[str]:
    """Returns all parameters of a module that it can take in few bits."""
    module, _ = _holder(model, name)
    path = name.rpartition(".")[0]
    names = (f"{path}.{own}" for own, _ in module.named_parameters(recurse=False))
    return {other for other in names if _can_hold(model, other)}


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module of a parameter, and the parameter's name in it."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def _can_hold(model: nn.Module, name: str) -> bool:
    module, own = _holder(model, name)
    return isinstance(module, CodedHolder) and module.can_hold_coded(own)


def _have_layouts(reads: Sequence[Read], can_keep: CanKeep) -> bool:
    """Whether all values have a layout, and the kernels multiply by what these make together."""
    found = [_layout(read) for read in reads]
    layouts = [layout for layout in found if layout is not None]
    if len(layouts) < len(found):
        return False
    layout = common_layout(layouts)
    return can_keep(layout.bits, layout.group_size, reads[0].shape[-1])


def _layout(read: Read) -> CodeLayout | None:
    if read.transpose or len(read.shape) != 2:
        return None
    return read.file.layout(read.key) if isinstance(read.file, CODED_FILES) else None


def units_shape(reads: Sequence[Read]) -> tuple[int, int]:
    """Returns the shape [n, U] of the units of a parameter that stays in few bits."""
    layout = common_layout([found for read in reads if (found := _layout(read)) is not None])
    return sum(read.shape[0] for read in reads), num_units(reads[0].shape[1], layout.bits)


def hold(model: nn.Module, name: str, reads: Sequence[Read], units: Tensor) -> CodedWeight:
    """Reads a parameter in few bits and hands it to its module. Returns it. units: int32 of
    `units_shape`, without values; what the file stores as words of codes is read into its place."""
    parts = []
    places = torch.split(units, [read.shape[0] for read in reads])
    for read, place in zip(reads, places, strict=True):
        assert isinstance(read.file, CODED_FILES)
        first, num_rows = read.first_value // read.shape[1], read.shape[0]
        weight = read.file.read_coded(read.key, place)
        parts.append(weight.rows(slice(first, first + num_rows)))
    weight = joined(parts, units)
    module, own = _holder(model, name)
    assert isinstance(module, CodedHolder)
    module.hold_coded(own, weight)
    return weight
