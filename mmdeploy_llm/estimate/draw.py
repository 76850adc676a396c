"""Draws random items of a source, the same ones for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mmdeploy_llm.batch.sources import Source
from mmdeploy_llm.datasets.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.records.ids import Selection
from mmdeploy_llm.records.item import Item


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Items of an input of `total` items. sizes: bytes of all files by line, where known."""

    items: tuple[Item | BadItem, ...]
    total: int
    sizes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Chosen:
    """These lines; see Lines."""

    lines: Collection[int]

    def takes(self, line: int) -> bool:
        """Returns whether the line is one of them."""
        return line in self.lines

    def is_past(self, line: int) -> bool:
        """Returns whether all of them come before this line."""
        return line > max(self.lines, default=0)


def draw(source: Source, selection: Selection, num_items: int, seed: int) -> Drawn:
    """Draws `num_items` of the source's items. Of files, one is drawn from each of `num_items`
    groups of about the same size. The items of a source whose number is unknown are all read, and
    of an iterator they are gone afterwards.

    Raises ConfigError for a number below 1, and for a source without items.
    """
    if num_items < 1:
        raise ConfigError(f"the number of items to estimate by must be at least 1, got {num_items}")
    rng = random.Random(seed)
    sizes, total = source.sizes(), source.total
    if sizes:
        lines = _of_all_sizes(sizes, num_items, rng)
    elif total is None or total <= num_items:
        return _checked(_reservoir(source, num_items, rng))
    else:
        places = rng.sample(range(total), num_items)
        step = selection.num_shards
        lines = {selection.shard + place * step for place in places}
    items = tuple(source.read(Chosen(lines)))
    return _checked(Drawn(items=items, total=total or len(sizes), sizes=sizes))


def _of_all_sizes(sizes: Mapping[int, int], num_items: int, rng: random.Random) -> set[int]:
    by_size: Sequence[int] = sorted(sizes, key=lambda line: (sizes[line], line))
    num = min(num_items, len(by_size))
    bounds = [len(by_size) * number // num for number in range(num + 1)]
    return {by_size[rng.randrange(begin, end)] for begin, end in itertools.pairwise(bounds)}


def _reservoir(source: Source, num_items: int, rng: random.Random) -> Drawn:
    """Reads all items, and holds no more than `num_items` of them."""
    kept: list[Item | BadItem] = []
    total = 0
    for total, item in enumerate(source, 1):
        if len(kept) < num_items:
            kept.append(item)
        elif (place := rng.randrange(total)) < num_items:
            kept[place] = item
    return Drawn(items=tuple(kept), total=total, sizes={})


def _checked(drawn: Drawn) -> Drawn:
    if not drawn.items:
        raise ConfigError("the input has no items, so there is nothing to estimate")
    return drawn
