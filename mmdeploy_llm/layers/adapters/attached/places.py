"""Places: the matrices of a model that an adapter changes, and its changes laid out as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from mmdeploy_llm.kernels.low_rank import Change
from mmdeploy_llm.layers.adapters import LowRank
from mmdeploy_llm.layers.basic.adapted import Lookup, Rows


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A matrix of a model: a parameter of a module, and its index in a stack of experts."""

    module: str
    name: str = "weight"
    index: int = -1  # of no stack

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + (f"[{self.index}]" if self.index >= 0 else "")


@dataclass(slots=True, kw_only=True)
class Placed:
    """Says what an adapter changes of one matrix [n, k].

    starts, num_columns: of the matrix, as this rank holds it. change: its low-rank changes.
    magnitudes: of DoRA, [rows] each. weights, biases: rows that take the place of the matrix's own
    and of its bias's.
    """

    starts: tuple[int, ...]
    num_columns: int
    change: Change | None = None
    magnitudes: tuple[Rows, ...] = ()
    weights: tuple[Rows, ...] = ()
    biases: tuple[Rows, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An adapter as one model, or one rank's shard of it, holds it in its dtype."""

    matrices: Mapping[Place, Placed]
    lookups: Mapping[str, Lookup]

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors in it."""
        for own in self.matrices.values():
            if own.change is not None:
                yield from (own.change.a, own.change.b)
            yield from (each.values for each in (*own.weights, *own.biases, *own.magnitudes))
        for lookup in self.lookups.values():
            found = (lookup.a, lookup.b, lookup.rows)
            yield from (each for each in found if each is not None)

    @property
    def computed_by_torch(self) -> list[str]:
        """The modules of which it changes more than kernels compute: whole matrices, and low-rank
        changes of embeddings."""
        found = [place.module for place, own in self.matrices.items() if own.weights]
        return found + [path for path, own in self.lookups.items() if own.a is not None]

    @property
    def num_bytes(self) -> int:
        """The memory of its tensors."""
        return sum(each.nbytes for each in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A low-rank change of some rows of one matrix. path: the adapter's name for it."""

    path: str
    start: int
    change: LowRank


def starts_of(module: nn.Module, name: str, n: int) -> tuple[int, ...]:
    """Returns the first rows of the parts of a matrix [n, k], the matrices of the checkpoint that
    it holds, and n."""
    parts = [*(getattr(module, "parts", None) or {}).values()]
    for own, rows in (getattr(module, "expert_parts", None) or {}).values():
        parts += [rows] if own == name and rows is not None else []
    return tuple(sorted({0, n, *(rows.start for rows in parts)}))


def combined(
    pieces: Sequence[Piece], starts: tuple[int, ...], k: int, dtype: torch.dtype
) -> Change:
    """Lays out the changes of a matrix [n, k] by its parts. In a part that several have changes of
    the rank is the sum of theirs."""
    n, inside = starts[-1], [list[Piece](), *([] for _ in starts[2:])]
    for part, (start, stop) in enumerate(pairwise(starts)):
        for piece in pieces:
            if piece.start < stop and start < piece.start + len(piece.change.b):
                inside[part].append(piece)
    places = [_rank_places(each) for each in inside]
    rank = max(max((stop for _, stop in each.values()), default=0) for each in places)
    a, b = torch.zeros(len(inside) * rank, k, dtype=dtype), torch.zeros(n, rank, dtype=dtype)
    scales = [next((x.change.scale for x in each if x.change.scale), 0.0) for each in inside]
    for part, (start, stop) in enumerate(pairwise(starts)):
        for piece in inside[part]:
            change, (first, end) = piece.change, places[part][id(piece.change.a)]
            low, high = max(start, piece.start), min(stop, piece.start + len(change.b))
            own = change.b[low - piece.start : high - piece.start]
            if change.scale != scales[part]:
                own = own.float() * (change.scale / scales[part])
            a[part * rank + first : part * rank + end] = change.a.flatten(1)
            b[low:high, first:end] = own
    return Change(a=a, b=b, starts=starts, scales=tuple(scales), shift=_shift(pieces, n))


def _rank_places(pieces: Sequence[Piece]) -> Mapping[int, tuple[int, int]]:
    """Returns the rows of each change's `a` among those of a part, by its identity: the rows of one
    module may lie apart."""
    found: dict[int, tuple[int, int]] = {}
    end = 0
    for piece in pieces:
        if id(piece.change.a) not in found:
            found[id(piece.change.a)] = end, end + piece.change.rank
            end += piece.change.rank
    return found


def _shift(pieces: Sequence[Piece], n: int) -> Tensor | None:
    """Returns what is added to each row of the output, [n] float32."""
    shift = None
    for piece in pieces:
        if piece.change.bias is not None:
            shift = torch.zeros(n) if shift is None else shift
            shift[piece.start : piece.start + len(piece.change.b)] += piece.change.bias.float()
    return shift


def held_of(ranges: Sequence[tuple[int, int]]) -> Tensor:
    parts = [torch.arange(first, stop) for first, stop in ranges]
    return torch.cat(parts) if parts else torch.arange(0)


def shared(placed: Placed, ranges: Sequence[tuple[int, int]], axis: int) -> Placed:
    """Returns what one rank holds of the changes of a matrix that it holds `ranges` of."""
    held = held_of(ranges)
    change, select = placed.change, _selected(held)
    if axis == 1:
        if change is not None:
            change = replace(change, a=change.a[:, held].contiguous())
        weights = tuple(replace(each, values=each.values[:, held]) for each in placed.weights)
        return replace(placed, num_columns=len(held), change=change, weights=weights)
    starts = tuple(int((held < start).sum()) for start in placed.starts)
    if change is not None:
        change = replace(
            change,
            b=change.b[held].contiguous(),
            starts=starts,
            shift=None if change.shift is None else change.shift[held],
        )
    return replace(
        placed,
        starts=starts,
        change=change,
        magnitudes=select(placed.magnitudes),
        weights=select(placed.weights),
        biases=select(placed.biases),
    )


def _selected(held: Tensor) -> Callable[[tuple[Rows, ...]], tuple[Rows, ...]]:
    def select(each: tuple[Rows, ...]) -> tuple[Rows, ...]:
        found = []
        for rows in each:
            inside = (held >= rows.start) & (held < rows.start + len(rows.values))
            if inside.any():
                start = int(inside.nonzero()[0])
                found.append(Rows(start=start, values=rows.values[held[inside] - rows.start]))
        return tuple(found)

    return select
