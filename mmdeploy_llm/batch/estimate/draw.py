"""Draws random items of a source, the same ones for the same seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mmdeploy_llm.batch.sources import Source
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError

MORE_FILES, MORE_ROWS = 200, 60  # rows may hold their pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Items of an input of `total` items. more: others in random order, which may be answered for
    the sake of the time alone. sizes, kinds: of all files by line, where known."""

    items: tuple[Item | BadItem, ...]
    more: tuple[Item | BadItem, ...]
    total: int
    sizes: Mapping[int, int]
    kinds: Mapping[int, str]


Items = list[Item | BadItem]


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
    most = num_items + MORE_ROWS
    if sizes:
        lines = _of_all_sizes(sizes, num_items, rng)
        more = _of_all_sizes(sizes, MORE_FILES, rng) - lines
        drawn = _read(source, lines, more, rng)
        total = len(sizes)
    elif total is None or total <= most:
        kept, total = _reservoir(source, most, rng)
        drawn = _split(kept, num_items, rng)
    else:
        places = rng.sample(range(total), most)
        lines = {selection.shard + place * selection.num_shards for place in places}
        drawn = _split([*source.read(Chosen(lines))], num_items, rng)
    if not drawn[0]:
        raise ConfigError("the input has no items, so there is nothing to estimate")
    return Drawn(
        items=tuple(drawn[0]),
        more=tuple(drawn[1]),
        total=total,
        sizes=sizes,
        kinds=source.kinds(),
    )


def _of_all_sizes(sizes: Mapping[int, int], num_items: int, rng: random.Random) -> set[int]:
    by_size: Sequence[int] = sorted(sizes, key=lambda line: (sizes[line], line))
    num = min(num_items, len(by_size))
    bounds = [len(by_size) * number // num for number in range(num + 1)]
    return {by_size[rng.randrange(begin, end)] for begin, end in itertools.pairwise(bounds)}


def _read(
    source: Source, lines: set[int], more: set[int], rng: random.Random
) -> tuple[Items, Items]:
    """Reads files: those of `lines`, and others in random order."""
    found = [*source.read(Chosen(lines | more))]
    others = [item for item in found if item.line not in lines]
    rng.shuffle(others)
    return [item for item in found if item.line in lines], others


def _reservoir(source: Source, num_items: int, rng: random.Random) -> tuple[Items, int]:
    """Reads all items, and holds no more than `num_items` of them. Returns them and their number
    in all."""
    kept: list[Item | BadItem] = []
    total = 0
    for total, item in enumerate(source, 1):
        if len(kept) < num_items:
            kept.append(item)
        elif (place := rng.randrange(total)) < num_items:
            kept[place] = item
    return kept, total


def _split(found: Items, num_items: int, rng: random.Random) -> tuple[Items, Items]:
    """Splits random items into the sample, in the order of the input, and the others."""
    rng.shuffle(found)
    return sorted(found[:num_items], key=lambda item: item.line), found[num_items:]
