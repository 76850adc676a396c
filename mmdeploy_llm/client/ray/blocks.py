"""BlockEngine: answers blocks of prompts with one engine, several blocks at the same time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from mmdeploy_llm.engine.desk.answerer import Answerer
from mmdeploy_llm.engine.desk.ask import Ask
from mmdeploy_llm.engine.desk.deaths import again, given_up
from mmdeploy_llm.engine.desk.outcome import Answer, refused
from mmdeploy_llm.errors import EngineError

from .deaths import Ledger, groups_of

logger = logging.getLogger(__name__)

DEAD = 70  # exit status of a process whose engine has died


def num_at_once(num_seqs: int, num_rows: int) -> int:
    """Returns how many blocks of num_rows an engine answers at the same time: twice what it
    computes, so that it has work while a block ends and the next one comes."""
    return max(2, -(-2 * num_seqs // num_rows))


def end_process(error: EngineError) -> NoReturn:
    """Ends this process, whose engine has died, as abruptly as if it had been killed, so that Ray
    treats both cases alike."""
    logger.error("the engine has died and takes its process along: %s", error)
    os._exit(DEAD)


class BlockEngine:
    """Answers blocks from several threads with one engine: rows of all of them are computed
    together.

    ledger: knows which rows died before. on_death: called when the engine cannot continue.
    """

    def __init__(
        self,
        llm: Answerer,
        ledger: Ledger,
        on_death: Callable[[EngineError], NoReturn] = end_process,
    ) -> None:
        self._llm, self._ledger, self._on_death = llm, ledger, on_death
        self._lock = SharedLock()

    def answer(self, block: str, asks: Sequence[Ask]) -> list[Answer]:
        """Returns the answers of a block in the order of its asks. block: its name, the same after
        the death of a process."""
        with self._lock.shared():
            deaths = self._ledger.begin(block, len(asks))
            answers = {} if deaths else self._run(asks)
        if deaths:
            answers = self._one_by_one(block, asks, deaths)
        self._ledger.end(block)
        return [answers[ask] for ask in asks]

    def _one_by_one(
        self, block: str, asks: Sequence[Ask], deaths: Sequence[int]
    ) -> dict[Ask, Answer]:
        """Answers a block that has met a death: its suspects by themselves, then the others."""
        answers: dict[Ask, Answer] = {}
        for ask, count in zip(asks, deaths, strict=True):
            if again(count) == "never":
                error = given_up()
                answers[ask] = Answer(ask=ask, output=refused(ask, error), error=error)
        groups = groups_of(deaths)
        if groups:
            with self._lock.alone():
                for group in groups:
                    self._ledger.run(block, group)
                    answers |= self._run([asks[row] for row in group])
                self._ledger.run(block, ())
        rest = [row for row, ask in enumerate(asks) if ask not in answers]
        with self._lock.shared():
            self._ledger.run(block, rest)
            return answers | self._run([asks[row] for row in rest])

    def _run(self, asks: Sequence[Ask]) -> dict[Ask, Answer]:
        try:
            return {answer.ask: answer for answer in self._llm.answer_each(asks)}
        except EngineError as error:
            self._on_death(error)


class SharedLock:
    """A lock that several threads share, or that one has alone. A thread that waits to be alone
    goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock guards the fields below
        self._num_inside = self._num_waiting = 0
        self._is_alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Enters when nobody is alone, or waits to be."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_alone or self._num_waiting))
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Enters when nobody else is inside."""
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not (self._is_alone or self._num_inside))
            self._num_waiting -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()
