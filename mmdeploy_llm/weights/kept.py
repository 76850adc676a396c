"""Keeps weights in the few bits in which their checkpoint stores them, where the kernels multiply
by such weights: no copy of them in floats is ever made."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.kernels.coded import (
    CodedWeight,
    CodeLayout,
    common_layout,
    joined,
    num_units,
)
from mmdeploy_llm.system.sharding import Share
from mmdeploy_llm.weights.tensor_file import CodedFile

from .shard import Read

logger = logging.getLogger(__name__)

# Whether the kernels multiply by a weight of these bits, columns of a group, and shape.
CanKeep = Callable[[CodeLayout, Sequence[int]], bool]


@runtime_checkable
class CodedHolder(Protocol):
    """A module whose weights may be in few bits."""

    def can_hold_coded(self, name: str) -> bool:
        """Whether `hold_coded` takes this parameter."""

    def hold_coded(self, name: str, weight: CodedWeight) -> None:
        """Takes the values of a parameter [n, k], or of a stack of these, one below the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A parameter that stays in few bits.

    reads: of its values, in the order of rows.
    layout: of all of them together.
    shape: of the whole parameter, [n, k], or [E, n, k] of a stack.
    share: what this rank holds of it; None: all.
    """

    reads: Sequence[Read]
    layout: CodeLayout
    shape: tuple[int, ...]
    share: Share | None = None

    @property
    def units_shape(self) -> tuple[int, int]:
        """The shape [n, U] of the units that this rank holds, those of a stack one below the
        other."""
        *rows, k = self.shape if self.share is None else self.share.shape_of(self.shape)
        return math.prod(rows), num_units(k, self.layout.bits)

    @property
    def num_bytes(self) -> int:
        """The bytes of these units."""
        return 4 * math.prod(self.units_shape)


def kept_weights(
    model: nn.Module,
    reads: Iterable[Read],
    can_keep: CanKeep,
    whole: Mapping[str, tuple[int, ...]],
    shares: Mapping[str, Share],
) -> Mapping[str, Kept]:
    """Returns the parameters that can stay in few bits: all values must come from weights that have
    a layout, and the module must take them, which has all of those that it can take in few bits or
    none. A share of columns must hold whole groups.

    whole: shapes of the parameters before they were divided between ranks. shares: those of this
    rank, of the parameters that are divided.
    """
    by_name: dict[str, list[Read]] = defaultdict(list)
    for read in reads:
        by_name[read.name].append(read)
    coded = [name for name, own in by_name.items() if all(_layout(read) for read in own)]
    found: dict[str, Kept] = {}
    for name in coded:
        own = sorted(by_name[name], key=lambda read: read.start)
        kept = _kept(own, whole[name], shares.get(name), can_keep)
        if kept is not None and _can_hold(model, name):
            found[name] = kept
    found = {name: own for name, own in found.items() if _siblings(model, name) <= found.keys()}
    left = [name for name in coded if name not in found]
    if left:
        logger.info("%d weights of few bits are dequantised, such as %s", len(left), left[0])
    return found


def _kept(
    reads: Sequence[Read], shape: tuple[int, ...], share: Share | None, can_keep: CanKeep
) -> Kept | None:
    """Returns how a parameter is kept; None where the kernels have no product with it."""
    layouts = [layout for read in reads if (layout := _layout(read)) is not None]
    if len({(layout.order, layout.is_float8) for layout in layouts}) > 1:
        return None
    layout, own = common_layout(layouts), shape
    if layout.order and len(shape) > 2:  # one order for the inputs of all experts
        return None
    if share is not None and share.axis == len(shape) - 1:
        if len(share.ranges) != 1 or not layout.can_cut(shape[-1], *share.ranges[0]):
            return None
        own = share.shape_of(shape)
    if not can_keep(layout, own):
        return None
    return Kept(reads=reads, layout=layout, shape=shape, share=share)


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


def _layout(read: Read) -> CodeLayout | None:
    if read.transpose or len(read.shape) != 2:
        return None
    return read.file.layout(read.key) if isinstance(read.file, CodedFile) else None


def hold(model: nn.Module, name: str, kept: Kept, units: Tensor) -> CodedWeight:
    """Reads a parameter in few bits and hands it to its module. Returns it. units: int32 of
    `units_shape`, without values; what the file stores as words of codes is read into its place.
    Raises CheckpointError for 8-bit floats that are no numbers, which the kernels do not know."""
    rows = [read.shape[0] for read in kept.reads]
    whole = units
    if kept.share is not None:
        shape = sum(rows), num_units(kept.shape[-1], kept.layout.bits)
        whole = torch.empty(shape, dtype=torch.int32)
    weight = joined(_parts(kept.reads, torch.split(whole, rows)), whole)
    if weight.has_nan():
        keys = ", ".join(dict.fromkeys(read.key for read in kept.reads))
        raise CheckpointError(
            f"{keys} in {kept.reads[0].file.path}: 8-bit floats that are no numbers (NaN). Values "
            "above 448 become NaN when a checkpoint is converted without scales; convert it again"
        )
    if kept.share is not None:
        weight = _taken(weight, kept.shape, kept.share)
        weight = replace(weight, units=units.copy_(weight.units))
    module, own = _holder(model, name)
    assert isinstance(module, CodedHolder)
    module.hold_coded(own, weight)
    return weight


def packed_bytes(module: nn.Module) -> int:
    """Returns the memory of a module's packed weights; 0 where their kernels do not tell it."""
    parts: Mapping[str, object] = getattr(module, "packed_parts", dict)()
    return sum(getattr(part, "num_bytes", 0) for part in parts.values())


def _parts(reads: Sequence[Read], targets: Sequence[Tensor]) -> list[CodedWeight]:
    """Returns what is read, from weights that are each decoded once. targets: memory of the units
    of each read, which a weight that has one read is decoded into."""
    num_reads = Counter((id(read.file), read.key) for read in reads)
    decoded: dict[tuple[int, str], CodedWeight] = {}
    parts = []
    for read, target in zip(reads, targets, strict=True):
        assert isinstance(read.file, CodedFile)
        key = id(read.file), read.key
        if key not in decoded:
            out = target if num_reads[key] == 1 else None
            decoded[key] = read.file.read_coded(read.key, out)
        first = read.first_value // read.shape[1]
        parts.append(decoded[key].rows(slice(first, first + read.shape[0])))
    return parts


def _taken(weight: CodedWeight, shape: Sequence[int], share: Share) -> CodedWeight:
    """Returns a share of a weight, or of a stack of weights."""
    if share.axis == len(shape) - 1:
        return weight.cut(*share.ranges[0])
    return weight.rows(share.take(torch.arange(weight.n).view(*shape[:-1])).flatten())
