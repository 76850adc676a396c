"""Estimate: what a batch will take."""

from __future__ import annotations

from dataclasses import dataclass

from mmdeploy_llm.data.records.record import Record

from .census import Kind, Tokens
from .faster import Faster
from .words import lines_of


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
