"""Estimate: what a batch will take; as text, for a terminal and for the page of its items."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmdeploy_llm.data.records.outcome import LACKING
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.messages import MEDIA_KINDS
from mmdeploy_llm.values.text.display import duration, seconds

from .census import Kind, Tokens
from .faster import Faster

MAX_NAMED = 3  # outliers of one kind that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A number, and between which bounds it is in 9 of 10 cases."""

    low: float
    middle: float
    high: float

    def scaled(self, factor: float) -> Range:
        """Returns the range times a factor."""
        return Range(low=self.low * factor, middle=self.middle * factor, high=self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The time and size of a batch on this machine, and the items by which that was found out.

    total: items of the input. kinds: see Kind. tokens: None when no item has media or could be
        counted.
    records: of the items that were answered, in order of the input.
    seconds: for all items. seconds_spent: on the sample.
    memory_bytes: the most that this process has held so far, with the model and its cache.
    output_bytes: of all records as JSON lines.
    faster: what would take less time, most effective first.
    is_left: whether the items are those that a resumed run has left. skipped: what is not read.
    are_steps_known: whether the costs of steps were measured; else the range is wide.
    """

    total: int
    kinds: tuple[Kind, ...]
    tokens: Tokens | None
    records: tuple[Record, ...]
    seconds: Range
    seconds_spent: float
    memory_bytes: int
    output_bytes: int
    faster: tuple[Faster, ...] = ()
    are_steps_known: bool = True
    unit: str = "item"
    is_left: bool = False
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns what is estimated as text."""
        return "\n".join(f"{label}: {value}" for label, value in self.lines().items())

    def lines(self) -> dict[str, str]:
        """Returns what is estimated: label -> value."""
        return lines_of(self)

    @property
    def seconds_per_item(self) -> Range:
        """Seconds for one item, when many are answered at the same time."""
        return self.seconds.scaled(1 / max(1, self.total))


def lines_of(found: Estimate) -> dict[str, str]:
    """Returns what is estimated: label -> value."""
    each = found.seconds_per_item
    left = " left" if found.is_left else ""
    lines = {
        "input": _input(found),
        "not read": "; ".join(filter(None, found.skipped)).removeprefix("skipped "),
        "media tokens": "" if found.tokens is None else _tokens(found.tokens),
        f"time per {found.unit}": f"{seconds(each.middle)} ({seconds(each.low)} to "
        f"{seconds(each.high)}), with others computed at the same time",
        f"time for all {found.total}{left}": f"{duration(found.seconds.middle)} "
        f"({_between(found.seconds)}) on this machine, without loading the model"
        + ("" if found.are_steps_known else "; the engines' steps were not seen, so it is rough"),
        "memory": f"{sized(found.memory_bytes)} at most so far, with the model and its cache",
        "output": f"about {sized(found.output_bytes)} as JSON lines",
        "faster with": "; ".join(
            f"{way.option}: {way.times:.1f} times"
            + (f" ({words})" if (words := _how(way.effect, way.is_measured)) else "")
            for way in found.faster
        ),
        "look at": "; ".join(outliers(found.records)),
    }
    return {label: value for label, value in lines.items() if value}


def outliers(records: Sequence[Record]) -> Iterator[str]:
    """Yields what stands out among the records, with the names of the items."""
    good = [record for record in records if record.is_ok]
    if good:
        largest = max(good, key=lambda record: record.num_prompt_tokens)
        yield f"longest prompt: {_name(largest)} ({largest.num_prompt_tokens} tokens)"
        longest = max(good, key=lambda record: record.num_output_tokens)
        yield f"longest answer: {_name(longest)} ({longest.num_output_tokens} tokens)"
    for outcome in ("failed", *LACKING):
        own = [record for record in records if record.outcome == outcome]
        if own:
            reasons: dict[str | None, list[Record]] = {}
            for record in own:
                why = None if record.error is None else record.error.message
                reasons.setdefault(why, []).append(record)
            told = [_named(of_one, why) for why, of_one in reasons.items()]
            more = [f"{len(told) - MAX_NAMED} more reasons"] if len(told) > MAX_NAMED + 1 else []
            told = [*told[:MAX_NAMED], *(more or told[MAX_NAMED:])]
            yield f"{len(own)} of {len(records)} {outcome}: {'; '.join(told)}"


def _named(records: Sequence[Record], why: str | None) -> str:
    """Names records that lack their answer for one reason."""
    names = ", ".join(map(_name, records[:MAX_NAMED]))
    more = f" and {len(records) - MAX_NAMED} more" if len(records) > MAX_NAMED else ""
    return f"{names}{more}: {why}" if why else f"{names}{more}"


def sized(num_bytes: float) -> str:
    """Formats bytes: "340 kB", "2.1 GB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            shown = num_bytes / size
            return f"{shown:.1f} {unit}" if shown < 10 else f"{shown:.0f} {unit}"
    return f"{num_bytes:.0f} bytes"


def _input(found: Estimate) -> str:
    """Names each kind; the sum too where there are several."""
    kinds = "; ".join(_kind(kind, found.unit) for kind in found.kinds)
    is_one = len(found.kinds) == 1 and found.kinds[0].num_bytes
    return kinds if is_one else f"{found.total} {found.unit}s: {kinds}"


def _kind(kind: Kind, unit: str) -> str:
    if not kind.num_bytes:
        return f"about {kind.num} {kind.kind}"
    of_others = "pages" if unit == "page" else "files"
    noun = f"{kind.kind}s" if kind.kind in MEDIA_KINDS else f"{kind.kind} {of_others}"
    return (
        f"{kind.num} {noun} of {sized(kind.num_bytes)} together, half of them above "
        f"{sized(kind.median)}, the largest {sized(kind.largest)} ({kind.name})"
    )


def _tokens(tokens: Tokens) -> str:
    return (
        f"median {tokens.median:.0f}, 95 % have at most {tokens.most_of:.0f}, largest "
        f"{tokens.largest} ({tokens.name}); {tokens.num_counted} counted"
    )


def _between(range_: Range) -> str:
    return f"{duration(range_.low)} to {duration(range_.high)}"


def _how(effect: str, is_measured: bool) -> str:
    return ", ".join(filter(None, (effect, "measured" if is_measured else "computed")))


def _name(record: Record) -> str:
    if record.path is not None:
        return os.path.basename(record.path) + record.part
    return f"line {record.line}" if record.id is None else str(record.id)
