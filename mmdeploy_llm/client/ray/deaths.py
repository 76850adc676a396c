"""Deaths: remembers which rows were being computed when a process died, so that a row that kills
every process it meets is found.

A row that has met a death is suspected: it is computed with few others and nothing else in the
process, and after that as engine/desk/deaths.py says: alone, then not again.

Ray runs a block again after the death of its process, under the same task id. What ran at that
moment is the `running` of the block, which only its begin or end removes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mmdeploy_llm.engine.desk.deaths import again


class Ledger(Protocol):
    """The methods of DeathLedger, in this process or in another."""

    def begin(self, block: str, num_rows: int) -> Sequence[int]:
        """See DeathLedger."""

    def run(self, block: str, rows: Sequence[int]) -> object:
        """See DeathLedger."""

    def end(self, block: str) -> object:
        """See DeathLedger."""


@dataclass(slots=True)
class _Block:
    """A block that has not ended. deaths: by row; those without are absent."""

    deaths: Counter[int] = field(default_factory=Counter)
    running: Sequence[int] = ()


class DeathLedger:
    """Counts the deaths of rows. Written by the workers, one call at a time. Memory holds the
    blocks that have begun and not ended."""

    def __init__(self) -> None:
        self._blocks: dict[str, _Block] = {}
        self._loads: Counter[str] = Counter()

    def begin(self, block: str, num_rows: int) -> list[int]:
        """Returns the deaths of each row, [] if there were none: then all rows run from now on. A
        block that is begun again was lost with its process: a death is counted for each row that
        ran."""
        known = self._blocks.setdefault(block, _Block())
        known.deaths.update(known.running)
        known.running = ()
        if not known.deaths:
            known.running = range(num_rows)
            return []
        return [known.deaths[row] for row in range(num_rows)]

    def run(self, block: str, rows: Sequence[int]) -> None:
        """Marks that these rows run from now on. Those that ran until now have been answered, so
        their deaths are forgotten."""
        known = self._blocks.setdefault(block, _Block())
        for row in known.running:
            del known.deaths[row]
        known.running = rows

    def end(self, block: str) -> None:
        """Forgets a block that has been answered."""
        self._blocks.pop(block, None)

    def load(self, actor: str) -> int:
        """Marks that an actor begins to load the model. Returns how many times in a row it has
        died meanwhile."""
        self._loads[actor] += 1
        return self._loads[actor] - 1

    def loaded(self, actor: str) -> None:
        """Marks that an actor has loaded the model."""
        del self._loads[actor]


def groups_of(deaths: Sequence[int]) -> list[list[int]]:
    """Returns the rows that must not run with others, in the groups in which they run: those with
    one death first, the square root of their number at a time, then the others alone."""
    once = [row for row, count in enumerate(deaths) if count == 1]
    size = max(1, math.isqrt(len(once)))
    together = [once[begin : begin + size] for begin in range(0, len(once), size)]
    return together + [[row] for row, count in enumerate(deaths) if again(count) == "alone"]
