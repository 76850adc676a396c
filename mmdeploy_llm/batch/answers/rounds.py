"""Rounds: pairs of an iterable, some of which are asked again."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.messages import Prompt
from mmdeploy_llm.params import SamplingParams

if TYPE_CHECKING:
    from mmdeploy_llm.desk.outcome import Answer

Pair = tuple[Prompt, SamplingParams]


class Answerer(Protocol):
    """The method of LLM that a batch needs."""

    def answer_each(self, pairs: Iterable[Pair]) -> Generator[Answer, None, None]:
        """Yields outputs as they finish, see LLM.answer_each."""


class Restartable(Answerer, Protocol):
    """An Answerer whose engine can die and be started again, such as LLM."""

    @property
    def death(self) -> EngineError | None:
        """Why nothing is computed any more; None while something is."""

    @property
    def num_dead(self) -> int:
        """Engines that have died while others go on."""

    def revive(self) -> None:
        """Starts engines in their place. Raises what loading raises."""

    def restart(self) -> None:
        """Starts an engine in place of the one that died. Raises what loading raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A pair and its index in the iterable. num_again: times that it was asked again."""

    index: int
    prompt: Prompt
    params: SamplingParams
    num_again: int = 0


class Rounds:
    """Yields the pairs of an iterable and, before the next of them, those to ask again. Used by one
    call of an Answerer at a time, since an engine numbers the pairs of each call from 0.

    Written by the thread that reads the answers, and by the one that takes the pairs.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._source = enumerate(pairs)
        self._again: deque[Task] = deque()
        self._in_flight: dict[int, Task] = {}
        self._is_exhausted = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to ask."""
        return self._is_exhausted and not self._again and not self._in_flight

    def pairs(self) -> Iterator[Pair]:
        """Yields what is left to ask, for one call; nothing may be in flight when it begins."""
        count = 0
        while (task := self._next()) is not None:
            self._in_flight[count] = task
            count += 1
            yield task.prompt, task.params

    def answered(self, index: int) -> Task:
        """Returns the task of an answer, by its index in this call."""
        return self._in_flight.pop(index)

    def again(self, task: Task) -> None:
        """Has a task asked before the next pair of the iterable."""
        self._again.append(task)

    def taken_back(self) -> list[Task]:
        """Returns the tasks without an answer, once the call has ended."""
        left = list(self._in_flight.values())
        self._in_flight.clear()
        return left

    def _next(self) -> Task | None:
        if self._again:
            return self._again.popleft()
        found = next(self._source, None)
        if found is None:
            self._is_exhausted = True
            return None
        index, (prompt, params) = found
        return Task(index=index, prompt=prompt, params=params)
