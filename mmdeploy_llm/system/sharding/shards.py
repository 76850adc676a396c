"""Shards a model over ranks: which rows, columns, heads and expert channels each rank holds.

A plan maps names of modules to these styles:

    colwise    a linear layer whose outputs are sharded, separately for each part of a merged layer
    heads      like colwise, by whole attention heads; with fewer key/value heads than ranks,
               several ranks hold the same one. Updates the parent's num_heads and num_kv_heads
    rowwise    a linear layer whose inputs are sharded and whose output is all-reduced
    experts    stacked experts, each sharded like colwise layers followed by a rowwise one
    vocab      an embedding or the output head, sharded by tokens
    whole      replicated on every rank

    rowwise-partial, experts-partial    without the all-reduce, which an enclosing module does once
    sum                                 the enclosing module whose output is all-reduced

Modules keep their classes and get fewer rows, columns and heads. Hooks and wrappers around modules
call the collectives, so that models contain no code for ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.caches import divided
from mmdeploy_llm.errors import ConfigError, PluginContractError

from .ranks import Ranks

MAX_SUGGESTED = 64  # error messages suggest numbers of ranks up to this
Range = tuple[int, int]  # first index, and one past the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's shard of a parameter: `ranges` of `axis`, concatenated in this order. Empty when
    the rank does not hold the parameter."""

    axis: int
    ranges: tuple[Range, ...]

    def take(self, whole: Tensor) -> Tensor:
        """Returns the rank's shard of the whole parameter."""
        pieces = [whole.narrow(self.axis, first, stop - first) for first, stop in self.ranges]
        return torch.cat(pieces, self.axis)

    def shape_of(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of the shard of a parameter of shape `whole`."""
        size = sum(stop - first for first, stop in self.ranges)
        return (*whole[: self.axis], size, *whole[self.axis + 1 :])


@dataclass(slots=True)
class _Division:
    """The state of one `divide` call: the model and the shards so far."""

    model: Any
    ranks: Ranks
    shares: dict[str, Share] = field(default_factory=dict)
    counts: dict[str, set[int]] = field(default_factory=dict)  # what is sharded -> its sizes
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # see _read_heads

    def even(self, size: int, what: str, unit: int = 1) -> Range:
        """Returns this rank's equal share of `size` values, in whole units."""
        count = size // unit
        self.counts.setdefault(what, set()).add(count)
        each = count // self.ranks.size * unit
        return self.ranks.rank * each, (self.ranks.rank + 1) * each

    def heads_of(self, size: int, unit: int, num_heads: int) -> Range:
        """Returns this rank's range of `size` values in whole heads of `unit` values. Key/value
        heads fewer than ranks are replicated."""
        count = size // unit
        if count >= num_heads or count % self.ranks.size == 0:
            return self.even(size, "heads of attention" if count >= num_heads else "KV heads", unit)
        if self.ranks.size % count:
            self.counts.setdefault("KV heads", set()).add(count)
        first = self.ranks.rank * count // self.ranks.size
        return first * unit, (first + 1) * unit

    def hold(self, path: str, name: str, axis: int, ranges: tuple[Range, ...]) -> None:
        """Replaces a parameter on the meta device by this rank's shard of it."""
        module = self.model.get_submodule(path)
        shape = list(module.get_parameter(name).shape)
        shape[axis] = sum(stop - first for first, stop in ranges)
        new = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        setattr(module, name, new if ranges else None)
        self.shares[f"{path}.{name}"] = Share(axis=axis, ranges=ranges)


def divide(model: nn.Module, plan: Mapping[str, str], ranks: Ranks, name: str) -> dict[str, Share]:
    """Reduces a model on the meta device to this rank's shard, by a plan of module name -> style.

    Returns the share of each parameter that is not replicated. name: the model's name in messages.
    Raises ConfigError when sizes are not divisible by the number of ranks or the plan shards no
    attention, PluginContractError for a plan that does not fit the model.
    """
    if "heads" not in plan.values():
        raise ConfigError(
            f"tensor_parallel_size = {ranks.size}, but {name} cannot be divided: its plugin has no "
            "tp_plan for it; use tensor_parallel_size = 1, or data_parallel_size to use several "
            "devices with a whole model on each"
        )
    _check_sums(plan, name)
    division = _Division(model=model, ranks=ranks, heads=_read_heads(model, plan))
    modules = [division.model.get_submodule(path) for path in _of(plan, "vocab")]
    # The head, which may write fewer tokens than have embeddings; without one these are it.
    modules.sort(key=lambda module: hasattr(module, "bias"))
    vocab_sizes = [module.weight.shape[0] for module in modules]
    for path, style in plan.items():
        if style not in STYLES:
            raise PluginContractError(
                f"the tp_plan of {name} has the style {style!r}; use {', '.join(STYLES)}"
            )
        STYLES[style](division, path)
    _check_counts(division, name)
    _set_heads(division)
    if vocab_sizes:
        whole: Any = partial(_whole_logits, division.model.logits, ranks, vocab_sizes[-1])
        division.model.logits = whole
    return division.shares


def shares_of(
    plan: Callable[[nn.Module, int], Mapping[str, str]], ranks: Ranks, name: str
) -> Callable[[nn.Module], dict[str, Share]]:
    """Returns a function that calls `divide` on a model with the plan that `plan` makes for the
    model and the number of ranks."""
    return lambda model: divide(model, plan(model, ranks.size), ranks, name)


def _of(plan: Mapping[str, str], style: str) -> list[str]:
    return [path for path, own in plan.items() if own == style]


def _read_heads(model: Any, plan: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Returns path of each attention module -> (number of query heads, rows per head). For a module
    without num_heads, the number is the rows of its widest projection / model.head_dim."""
    widest: dict[str, int] = {}
    for path in _of(plan, "heads"):
        sizes = [rows.stop - rows.start for rows in _row_slices(model.get_submodule(path))]
        parent = path.rpartition(".")[0]
        widest[parent] = max(widest.get(parent, 0), *sizes)
    found = {}
    for parent, size in widest.items():
        num_heads = getattr(model.get_submodule(parent), "num_heads", size // model.head_dim)
        found[parent] = num_heads, size // num_heads
    return found


def _check_counts(division: _Division, name: str) -> None:
    size, counts = division.ranks.size, division.counts
    wrong = [f"{n} {what}" for what, all_n in counts.items() for n in all_n if n % size]
    if not wrong:
        return
    kv_heads = counts.get("KV heads", {1})
    shared = math.gcd(*(n for what, all_n in counts.items() if what != "KV heads" for n in all_n))
    sizes = [n for n in range(1, MAX_SUGGESTED + 1) if shared % n == 0]
    fit = [n for n in sizes if all(n % k == 0 or k % n == 0 for k in kv_heads)]
    raise ConfigError(
        f"tensor_parallel_size = {size} does not divide {', '.join(wrong)} of {name}; "
        f"use {', '.join(map(str, fit))}"
    )


def _check_sums(plan: Mapping[str, str], name: str) -> None:
    """Raises PluginContractError unless each "sum" module encloses a partial one, and each partial
    one is in exactly one "sum" module."""
    sums = set(_of(plan, "sum"))
    used: set[str] = set()
    for path, style in plan.items():
        if style.endswith("-partial"):
            names = path.split(".")
            enclosing = {".".join(names[:n]) for n in range(1, len(names))} & sums
            if len(enclosing) != 1:
                raise PluginContractError(
                    f"the tp_plan of {name} has {path!r} as {style!r} within {len(enclosing)} "
                    "modules of style 'sum'; it must be within exactly one"
                )
            used |= enclosing
    if sums - used:
        raise PluginContractError(
            f"the tp_plan of {name} sums {sorted(sums - used)[0]!r}, which has no partial module; "
            "give it and the modules in it the style 'whole'"
        )


def _colwise(division: _Division, path: str) -> None:
    module = division.model.get_submodule(path)
    whole = _row_slices(module)
    ranges = [division.even(rows.stop - rows.start, f"rows of {_kind(path)}") for rows in whole]
    _hold_rows(division, path, ranges)
    parent = division.model.get_submodule(path.rpartition(".")[0])
    if hasattr(parent, "intermediate_size"):
        parent.intermediate_size = ranges[0][1] - ranges[0][0]


def _heads(division: _Division, path: str) -> None:
    parent = path.rpartition(".")[0]
    num_heads, unit = division.heads[parent]
    whole = _row_slices(division.model.get_submodule(path))
    # A part may have more rows for each head than the others: queries with a gate, for example.
    module = division.model.get_submodule(parent)
    least = getattr(module, "head_dim", unit)
    sizes = [rows.stop - rows.start for rows in whole]
    ranges = [division.heads_of(n, max(n // num_heads, least), num_heads) for n in sizes]
    _hold_rows(division, path, ranges)
    for name in getattr(module, "head_values", ()):
        values, own = getattr(module, name, None), division.heads_of(num_heads, 1, num_heads)
        if isinstance(values, tuple):
            setattr(module, name, values[slice(*own)])
        elif values is not None:
            division.hold(parent, name, 0, (own,))


def _state_heads(division: _Division, path: str) -> None:
    """Divides the layer around a convolution with a state by its heads: its attribute `head_rows`
    names the rows of each parameter that belong to heads, `divided_counts` the attributes that
    count these."""
    path = path.rpartition(".")[0]
    module: Any = division.model.get_submodule(path)
    for name in module.divided_counts:
        first, stop = division.even(getattr(module, name), "heads of layers with states")
        setattr(module, name, stop - first)
    for name, parts in module.head_rows.items():
        held = []
        for rows in parts:
            first, stop = division.even(rows.stop - rows.start, "rows of layers with states")
            held.append((rows.start + first, rows.start + stop))
        parent, _, own = name.rpartition(".")
        division.hold(f"{path}.{parent}" if parent else path, own, 0, tuple(held))


def _hold_rows(division: _Division, path: str, ranges: list[Range]) -> None:
    """Shards weight and bias of a layer by one range per merged part; updates `parts`."""
    module = division.model.get_submodule(path)
    whole = _row_slices(module)
    held = tuple(
        (rows.start + a, rows.start + b) for rows, (a, b) in zip(whole, ranges, strict=True)
    )
    for name, _ in list(module.named_parameters(recurse=False)):
        division.hold(path, name, 0, held)
    if getattr(module, "parts", None):
        start, parts = 0, {}
        for part, (first, stop) in zip(module.parts, held, strict=True):
            parts[part] = slice(start, start + stop - first)
            start += stop - first
        module.parts = parts


def _rowwise(division: _Division, path: str) -> None:
    _rowwise_partial(division, path)
    _sum(division, path)


def _rowwise_partial(division: _Division, path: str) -> None:
    module = division.model.get_submodule(path)
    columns = division.even(module.weight.shape[1], f"columns of {_kind(path)}")
    division.hold(path, "weight", 1, (columns,))
    if module.bias is not None and division.ranks.rank:
        division.hold(path, "bias", 0, ())  # only rank 0 adds it, since outputs are summed


def _experts(division: _Division, path: str) -> None:
    _experts_partial(division, path)
    _sum(division, path)


def _experts_partial(division: _Division, path: str) -> None:
    module = division.model.get_submodule(path)
    rows_of: dict[str, list[Range]] = {}
    parts: dict[str, tuple[str, slice | None]] = {}
    for part, (name, rows) in module.expert_parts.items():
        if rows is None:
            columns = division.even(module.get_parameter(name).shape[2], "channels of an expert")
            division.hold(path, name, 2, (columns,))
            parts[part] = name, None
        else:
            first, stop = division.even(rows.stop - rows.start, "channels of an expert")
            held = rows_of.setdefault(name, [])
            start = sum(b - a for a, b in held)
            parts[part] = name, slice(start, start + stop - first)
            held.append((rows.start + first, rows.start + stop))
    for name, ranges in rows_of.items():
        division.hold(path, name, 1, tuple(ranges))
    module.expert_parts = parts
    for name in module.added_once if division.ranks.rank else ():
        division.hold(path, name, 0, ())  # only rank 0 adds it, since outputs are summed


def _vocab(division: _Division, path: str) -> None:
    module = division.model.get_submodule(path)
    size = module.weight.shape[0]
    each = -(-size // division.ranks.size)
    first, stop = (min(size, (division.ranks.rank + n) * each) for n in (0, 1))
    for name, _ in list(module.named_parameters(recurse=False)):
        division.hold(path, name, 0, ((first, stop),))
    if not hasattr(module, "bias"):  # an embedding, not a head
        module.forward = partial(_look_up, module.forward, division.ranks, first, stop - first)


def _look_up(
    inner: Callable[[Tensor], Tensor], ranks: Ranks, first: int, size: int, token_ids: Tensor
) -> Tensor:
    """Returns the embeddings of all tokens: each rank looks up its own tokens, and the results are
    summed over the ranks."""
    local = token_ids - first
    is_other = (local < 0) | (local >= size)
    rows = inner(local.masked_fill_(is_other, 0))
    return ranks.sum(rows.masked_fill_(is_other.unsqueeze(-1), 0))


def _whole_logits(
    inner: Callable[[Tensor], Tensor], ranks: Ranks, vocab_size: int, hidden: Tensor
) -> Tensor:
    """Gathers the logits of all ranks: [N, hidden] -> [N, vocab_size]."""
    local = inner(hidden)
    if local.shape[-1] == vocab_size:
        return local
    each = -(-vocab_size // ranks.size)
    return ranks.gather(F.pad(local, (0, each - local.shape[-1])))[:, :vocab_size]


def _sum(division: _Division, path: str) -> None:
    module: nn.Module = division.model.get_submodule(path)
    module.register_forward_hook(partial(_summed, division.ranks))


def _summed(ranks: Ranks, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return ranks.sum(output)


def _whole(division: _Division, path: str) -> None:
    """Leaves the module replicated."""


def _set_heads(division: _Division) -> None:
    """Sets the number of heads of this rank on attention modules, and on the model, by which the KV
    cache is sized."""
    size = division.ranks.size
    for module in (division.model, *map(division.model.get_submodule, division.heads)):
        for name in ("num_heads", "num_kv_heads"):
            if hasattr(module, name):
                setattr(module, name, max(1, getattr(module, name) // size))
    model: Any = division.model
    if getattr(model, "cache", None) is not None:
        model.cache = tuple(divided(layer, size) for layer in model.cache)


def _row_slices(module: Any) -> list[slice]:
    """Returns the rows of each part of a merged layer, all rows of any other layer."""
    parts = getattr(module, "parts", None)
    return list(parts.values()) if parts else [slice(0, module.weight.shape[0])]


def _kind(path: str) -> str:
    """Returns the last name of a module's path, for messages."""
    return path.rpartition(".")[2]


STYLES: Mapping[str, Callable[[_Division, str], None]] = {
    "colwise": _colwise,
    "heads": _heads,
    "rowwise": _rowwise,
    "rowwise-partial": _rowwise_partial,
    "experts": _experts,
    "experts-partial": _experts_partial,
    "vocab": _vocab,
    "whole": _whole,
    "state-heads": _state_heads,
    "sum": _sum,
}
