"""Names the first module of a model whose output is not that of transformers' model.

Modules of the two models belong together when they hold the same tensor of the checkpoint: where a
projection is fused, the rows that the tensor fills are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two modules that hold the same tensor. key: the tensor. rows: of the output of `mine`."""

    key: str
    mine: nn.Module
    theirs: nn.Module
    name: str
    rows: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Holds what a module received and returned at its first call, [tokens, values]."""

    given: Tensor | None
    returned: Tensor | None


def first_difference(
    model: Any,
    reference: nn.Module,
    run_model: Callable[[], Any],
    run_reference: Callable[[], Any],
    tolerance: float,
) -> str | None:
    """Says which module's result differs first, in the order in which the reference computes, and
    whether its weight does; None where no pair of modules shows it."""
    pairs = list(_pairs(model, reference))
    with _recording([pair.mine for pair in pairs]) as mine:
        run_model()
    with _recording([pair.theirs for pair in pairs]) as theirs:
        run_reference()
    by_module = {id(pair.theirs): pair for pair in pairs}
    agreed: list[str] = []
    for identity, expected in theirs.items():  # in the order of the calls
        pair = by_module[identity]
        found = mine.get(id(pair.mine))
        if found is None:
            continue
        problem = _difference(pair, found, expected, tolerance)
        if problem is not None:
            return f"{problem}{_agreeing(agreed, pair.name)}"
        agreed.append(pair.name)
    return None


def _difference(pair: Pair, found: Seen, expected: Seen, tolerance: float) -> str | None:
    error = _error(found.given, expected.given, slice(None))
    if error is not None and error > tolerance:
        return f"what goes into {pair.name} differs first: max |difference| {error:.2g}"
    error = _error(found.returned, expected.returned, pair.rows)
    if error is None or error <= tolerance:
        return None
    what = f"the output of {pair.name} differs first: max |difference| {error:.2g}"
    if pair.rows != slice(None):
        what += f" (in the rows of {pair.key})"
    return f"{what}, of the same input{_of_weights(pair)}"


def _of_weights(pair: Pair) -> str:
    """Says how the weights differ, where they do."""
    mine: Tensor = pair.mine.get_parameter("weight").detach()[pair.rows].float()
    theirs: Tensor = pair.theirs.get_parameter("weight").detach().float()
    if mine.shape == theirs.shape and torch.equal(mine, theirs):
        return "; the weights are the same: look at its bias, epsilon, scale or activation"
    if mine.dim() == 2 and mine.shape == theirs.T.shape and torch.equal(mine, theirs.T):
        how = "transposed"
    elif mine.numel() == theirs.numel() and torch.equal(
        mine.flatten().sort().values, theirs.flatten().sort().values
    ):
        how = "permuted"
    else:
        how = "other values"
    return f"; its weight, {pair.key!r} of the checkpoint, is {how} here: look at weight_targets"


def _error(found: Tensor | None, expected: Tensor | None, rows: slice) -> float | None:
    """Returns the largest difference; None where the two cannot be compared."""
    if found is None or expected is None:
        return None
    found = found[:, rows]
    if found.shape != expected.shape:
        return None
    if torch.allclose(found.sort().values, expected.sort().values, rtol=0, atol=1e-5):
        return 0.0  # a model may keep the channels of heads in another order
    return float((found - expected).abs().max())


def _agreeing(names: Sequence[str], last: str) -> str:
    """Says which modules came before, by their layers."""
    if not names:
        return "; nothing before it could be compared"
    own = _layer(last)
    before = sorted({layer for layer in map(_layer, names) if layer is not None and layer != own})
    own_names = list(dict.fromkeys(name for name in names if _layer(name) == own))
    parts = [f"layers {before[0]} to {before[-1]}"] if len(before) > 1 else []
    parts += [f"layer {before[0]}"] if len(before) == 1 else []
    parts += [name.rpartition(".")[2] for name in own_names[-4:]]
    return f"; {', '.join(parts)} agree"


def _layer(name: str) -> int | None:
    """Returns the number of the layer in a module's name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _pairs(model: Any, reference: nn.Module) -> Iterator[Pair]:
    modules = dict(model.named_modules())
    seen = set()
    for name, module in reference.named_modules():
        key = name + WEIGHT
        if not isinstance(getattr(module, "weight", None), Tensor):
            continue
        targets: tuple[Any, ...] = model.weight_targets(key) or ()
        if len(targets) != 1:
            continue
        target = targets[0]
        own = target.name.removesuffix(WEIGHT)
        is_whole = target.index is None and target.source is None
        if is_whole and own in modules and id(module) not in seen:
            seen.add(id(module))
            rows = slice(None) if target.rows is None else target.rows
            yield Pair(key=key, mine=modules[own], theirs=module, name=own, rows=rows)


@contextmanager
def _recording(modules: Sequence[nn.Module]) -> Iterator[dict[int, Seen]]:
    """Yields id of a module -> what it saw at its first call, in the order of the calls."""
    found: dict[int, Seen] = {}

    def record(identity: int, module: nn.Module, given: Any, returned: Any) -> None:
        if identity not in found:
            first = given[0] if given else None
            found[identity] = Seen(given=_flat(first), returned=_flat(returned))

    with ExitStack() as stack:
        for module in {id(module): module for module in modules}.values():
            stack.callback(module.register_forward_hook(partial(record, id(module))).remove)
        yield found


def _flat(value: Any) -> Tensor | None:
    """Returns values of tokens, [tokens, values], of a tensor that may have a batch of one."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
        return None
    if value.dim() > 2 and value.shape[0] == 1:
        value = value[0]
    found: Tensor = value.detach().float().flatten(1).clone()  # models add to it in place
    return found
