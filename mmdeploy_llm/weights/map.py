"""How the keys of a checkpoint reach the parameters of a model.

A model declares it in one method, asked once for every key of the checkpoint:

    def weight_targets(self, key: str) -> Sequence[Target] | None

None says that the key is unknown (an error), an empty sequence that it is known and not needed.
Most models build a WeightMap in their constructor and return `self.weight_map.targets(key)`. It
knows every parameter by its own name, and what modules say of themselves:

    parts          MergedLinear "a.qkv_proj" with parts {"q_proj": slice(0, 64), ...} also takes
                   "a.q_proj.weight" and "a.q_proj.bias" into those rows
    expert_parts   Experts "a.experts" with expert_parts {"down_proj": ("down_proj", None), ...}
                   also takes "a.experts.3.down_proj.weight" into expert 3

so that a plugin only adds the names in which the checkpoint differs (`renames`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

Replacement = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place for a tensor of the checkpoint.

    name: the parameter. index: expert number, the parameter's first axis. rows: which rows (first
    axis, behind `index`) are filled; None is all. source: which rows of the checkpoint's tensor are
    meant; None is all. transpose: the checkpoint holds the last two axes swapped; None: as the
    shapes tell, not swapped where both fit.
    """

    name: str
    index: int | None = None
    rows: slice | None = None
    source: slice | None = None
    transpose: bool | None = False


class WeightMap:
    """The usual `weight_targets`: own names, fused parts, stacked experts, renames.

    renames: (pattern, replacement) pairs of re.sub, applied in order to every key before it is
    looked up. ignored: patterns (re.search, on the key as it is) of keys that are not needed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        renames: Sequence[tuple[str, Replacement]] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        self._places = _places(model)
        self._renames = tuple((re.compile(pattern), new) for pattern, new in renames)
        self._ignored = re.compile("|".join(ignored)) if ignored else None

    def targets(self, key: str) -> Sequence[Target] | None:
        """Where the tensor called `key` goes: () nowhere, None when nothing is called so."""
        if self._ignored is not None and self._ignored.search(key):
            return ()
        for pattern, new in self._renames:
            key = pattern.sub(new, key)
        place = self._places.get(key)
        return None if place is None else (place,)


def _places(model: nn.Module) -> Mapping[str, Target]:
    places = {name: Target(name=name) for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        parent = path.rpartition(".")[0]
        for part, rows in (getattr(module, "parts", None) or {}).items():
            for name in names:
                places[f"{parent}.{part}.{name}"] = Target(name=f"{path}.{name}", rows=rows)
        for part, (name, rows) in (getattr(module, "expert_parts", None) or {}).items():
            for index in range(module.get_parameter(name).shape[0]):
                target = Target(name=f"{path}.{name}", index=index, rows=rows)
                places[f"{path}.{index}.{part}.weight"] = target
    return places
