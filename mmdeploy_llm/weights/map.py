"""Maps the keys of a checkpoint to the parameters of a model.

A model declares the mapping in one method, which is called once per key of the checkpoint:

    def weight_targets(self, key: str) -> Sequence[Target] | None

None means that the key is unknown (an error), an empty sequence that it is known but not needed.
Most models build a WeightMap in their constructor and return `self.weight_map.targets(key)`. It
maps every parameter's own name, and the names that modules declare in these attributes:

    parts          MergedLinear "a.qkv_proj" with parts {"q_proj": slice(0, 64), ...} also loads
                   "a.q_proj.weight" and "a.q_proj.bias" into those rows
    expert_parts   Experts "a.experts" with expert_parts {"down_proj": ("down_proj", None), ...}
                   also loads "a.experts.3.down_proj.weight" into expert 3

so that a plugin lists only the names that differ in the checkpoint (`renames`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

Replacement = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The parameter values that a tensor of the checkpoint fills.

    name: the parameter.
    index: index on the parameter's first axis, such as an expert.
    rows: the rows to fill (first axis, after `index`); None is all.
    other_rows: the rows to fill where the checkpoint's tensor has not as many as `rows`; None: that
        is an error.
    source_index: index on the first axis of the checkpoint's tensor. num_sources: the size of that
        axis, which is checked; None: any that holds the index.
    source: the rows of the checkpoint's tensor to read (first axis, after `source_index`); None is
        all.
    transpose: whether the checkpoint stores the last two axes swapped; None decides by the shapes,
        not swapped if both fit.
    """

    name: str
    index: int | None = None
    rows: slice | None = None
    other_rows: slice | None = None
    source_index: int | None = None
    num_sources: int | None = None
    source: slice | None = None
    transpose: bool | None = False


def fused_head_targets(
    name: str, num_heads: int, head_dim: int, group: int = 1
) -> tuple[Target, ...]:
    """Returns the targets of a matrix, or bias, that stores the queries, the key and the value of
    each key head in turn [heads, group + 2, head_dim], in the parameter `name` of a qkv_proj, where
    all queries come first, then all keys. group: query heads of a key head."""

    def rows(start: int, count: int = 1) -> slice:
        return slice(start * head_dim, (start + count) * head_dim)

    targets, queries = [], num_heads * group
    for head in range(num_heads):
        first = head * (group + 2)
        targets.append(Target(name=name, rows=rows(head * group, group), source=rows(first, group)))
        for part in range(2):
            to = rows(queries + part * num_heads + head)
            targets.append(Target(name=name, rows=to, source=rows(first + group + part)))
    return tuple(targets)


class WeightMap:
    """Implements `weight_targets` for most models: own names, merged layers, stacked experts.

    renames: (pattern, replacement) pairs for re.sub, applied in order to each key before lookup.
    ignored: patterns (re.search on the original key) of keys that are not needed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        renames: Sequence[tuple[str, Replacement]] = (),
        ignored: Sequence[str] = (),
    ) -> None:
        self._targets = _targets(model)
        self.renames, self.ignored = tuple(renames), tuple(ignored)
        self._renames = tuple((re.compile(pattern), new) for pattern, new in renames)
        self._ignored = re.compile("|".join(ignored)) if ignored else None

    def targets(self, key: str) -> Sequence[Target] | None:
        """Returns the targets of the tensor `key`: () for an ignored, None for an unknown key."""
        if self._ignored is not None and self._ignored.search(key):
            return ()
        for pattern, new in self._renames:
            key = pattern.sub(new, key)
        target = self._targets.get(key)
        return None if target is None else (target,)


def _targets(model: nn.Module) -> Mapping[str, Target]:
    targets = {name: Target(name=name) for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        parent = path.rpartition(".")[0]
        for part, rows in (getattr(module, "parts", None) or {}).items():
            for name in names:
                targets[f"{parent}.{part}.{name}"] = Target(name=f"{path}.{name}", rows=rows)
        for part, (name, rows) in (getattr(module, "expert_parts", None) or {}).items():
            for index in range(module.get_parameter(name).shape[0]):
                target = Target(name=f"{path}.{name}", index=index, rows=rows)
                targets[f"{path}.{index}.{part}.weight"] = target
    return targets
