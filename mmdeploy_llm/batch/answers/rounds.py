"""Rounds: asks of an iterable, some of which are asked again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmdeploy_llm.engine.desk.ask import Ask


class Rounds:
    """Yields the asks of an iterable and, before the next of them, those to ask again. One call of
    an Answerer may end before the last answers say what to ask again; another one then begins.

    Written by the thread that reads the answers, and by the one that takes the asks.
    """

    def __init__(self, asks: Iterable[Ask]) -> None:
        self._source = iter(asks)
        self._again: deque[Ask] = deque()
        self._is_exhausted = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to ask."""
        return self._is_exhausted and not self._again

    def asks(self) -> Iterator[Ask]:
        """Yields what is left to ask, for one call."""
        while (ask := self._next()) is not None:
            yield ask

    def again(self, ask: Ask) -> None:
        """Has it asked before the next of the iterable."""
        self._again.append(ask)

    def _next(self) -> Ask | None:
        if self._again:
            return self._again.popleft()
        found = next(self._source, None)
        self._is_exhausted = found is None
        return found
