"""Keeps weights in the few bits in which their checkpoint stores them, where the kernels multiply
by such weights: no copy of them in floats is ever made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from mmdeploy_llm.kernels import WeightMemory
from mmdeploy_llm.kernels.coded import Bits, CodedWeight, joined

from .gguf import GGUFFile
from .quantized import Coding, QuantizedFile
from .shard import Read

# Whether the kernels multiply by weights of these bits, columns of a group, and columns.
CanKeep = Callable[[Bits, int, int], bool]


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
    values must come from layers with the same coding, and the module must take them."""
    by_name: dict[str, list[Read]] = defaultdict(list)
    for read in reads:
        by_name[read.name].append(read)
    return {
        name: sorted(own, key=lambda read: read.start)
        for name, own in by_name.items()
        if _can_hold(model, name) and _have_one_coding(own, can_keep)
    }


def _can_hold(model: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    holder: Any = model.get_submodule(path)
    return hasattr(holder, "can_hold_coded") and bool(holder.can_hold_coded(own))


def _have_one_coding(reads: Sequence[Read], can_keep: CanKeep) -> bool:
    codings = {_coding(read) for read in reads}
    first = codings.pop()
    if codings or first is None:
        return False
    return can_keep(first.bits, first.group_size, reads[0].shape[-1])


def _coding(read: Read) -> Coding | None:
    if (
        not isinstance(read.file, QuantizedFile | GGUFFile)
        or read.transpose
        or len(read.shape) != 2
    ):
        return None
    return read.file.coding(read.key)


def hold(
    model: nn.Module, name: str, reads: Sequence[Read], memory: WeightMemory | None
) -> CodedWeight:
    """Reads a parameter in few bits and hands it to its module. Returns it."""
    parts = []
    for read in reads:
        assert isinstance(read.file, QuantizedFile | GGUFFile)
        first = read.first_value // read.shape[1]
        parts.append(read.file.read_coded(read.key).rows(first, first + read.shape[0]))
    weight = joined(parts, memory)
    path, _, own = name.rpartition(".")
    holder: Any = model.get_submodule(path)
    holder.hold_coded(own, weight)
    return weight
