"""Counts an input: its files by kind and size, and the tokens of its media from their headers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmdeploy_llm.batch.sources import Source
from mmdeploy_llm.data.records.item import Item, part_of
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.engine.intake.rendered import TokenCount
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.values.prompt import PromptParts

from .draw import Chosen, Drawn

MAX_COUNTED = 200  # items drawn at random whose headers are read, besides the sample
NUM_LARGEST = 20  # the largest files, whose headers are read too
MAX_SECONDS = 10.0  # for reading headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The items of one kind of media. num_bytes: of their files, 0 when not known; the largest one
    has `largest` bytes and this name."""

    kind: str
    num: int
    num_bytes: int = 0
    median: int = 0
    largest: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of the media of an item: those of all items that were counted. name: of the item with
    most. prompt: mean tokens of a prompt drawn at random, and of its media."""

    num_counted: int
    median: float
    most_of: float  # 95 % have no more
    largest: int
    name: str
    prompt: float
    media: float


def kinds_of(drawn: Drawn, names: Mapping[int, str]) -> tuple[Kind, ...]:
    """Counts all files, or, where the input holds rows, projects the kinds of the sample."""
    if drawn.sizes:
        groups: dict[str, list[int]] = {}
        for line in drawn.sizes:
            groups.setdefault(drawn.kinds[line], []).append(line)
        return tuple(_files(kind, lines, drawn.sizes, names) for kind, lines in groups.items())
    kinds = [_kind_of(item) for item in drawn.items]
    share = drawn.total / len(kinds)
    return tuple(
        Kind(kind=kind, num=round(kinds.count(kind) * share)) for kind in dict.fromkeys(kinds)
    )


def _files(
    kind: str, lines: Sequence[int], sizes: Mapping[int, int], names: Mapping[int, str]
) -> Kind:
    largest = max(lines, key=sizes.__getitem__)
    own = [sizes[line] for line in lines]
    return Kind(
        kind=kind,
        num=len(lines),
        num_bytes=sum(own),
        median=int(statistics.median(own)),
        largest=sizes[largest],
        name=names[largest],
    )


def _kind_of(item: Item | BadItem) -> str:
    if isinstance(item, BadItem):
        return "unusable row"
    kinds = sorted({media.kind for media in item.media})
    return " + ".join(kinds) or "text"


def name_of(item: Item | BadItem) -> str:
    """Returns the file of an item, else its id or line."""
    if isinstance(item, Item) and item.path is not None:
        return item.path + part_of(item.id, item.path)
    return f"line {item.line}" if item.id is None else str(item.id)


def count_tokens(
    source: Source, drawn: Drawn, seed: int, count: Callable[[PromptParts], TokenCount]
) -> Tokens | None:
    """Counts the tokens of the sample, of other files drawn at random and of the largest files,
    within MAX_SECONDS; None when none could be counted."""
    rng = random.Random(seed + 1)
    lines = rng.sample(sorted(drawn.sizes), min(MAX_COUNTED, len(drawn.sizes)))
    others = [*source.read(Chosen({*lines}))] if lines else [*drawn.items]
    rng.shuffle(others)  # those that are counted in time are a fair sample
    largest = sorted(drawn.sizes, key=drawn.sizes.__getitem__)[-NUM_LARGEST:]
    fair = list(_counts(others, count))
    top = _counts(source.read(Chosen({*largest})), count) if largest else iter(())
    by_name = {name: media for name, _, media in (*fair, *top)}
    if not fair:
        return None
    values = sorted(media for _, _, media in fair)
    most = max(by_name, key=by_name.__getitem__)
    return Tokens(
        num_counted=len(by_name),
        median=statistics.median(values),
        most_of=values[min(len(values) - 1, int(0.95 * len(values)))],
        largest=by_name[most],
        name=most,
        prompt=statistics.fmean(prompt for _, prompt, _ in fair),
        media=statistics.fmean(values),
    )


def _counts(
    items: Iterable[Item | BadItem], count: Callable[[PromptParts], TokenCount]
) -> Iterator[tuple[str, int, int]]:
    """Yields name, prompt tokens and media tokens of items, until MAX_SECONDS are over."""
    deadline = time.monotonic() + MAX_SECONDS
    for item in items:
        if not isinstance(item, Item):
            continue
        try:
            found = [count(prompt) for prompt in item.prompts]
        except RequestError:  # the run will say what is wrong with it
            continue
        yield (
            name_of(item),
            sum(own.num_prompt_tokens for own in found),
            sum(sum(own.num_input_tokens_by_kind.values()) for own in found),
        )
        if time.monotonic() > deadline:
            return
