"""BlockEngine: answers blocks of prompts with one engine, several blocks at the same time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from mmdeploy_llm.batch.answers.rounds import Answerer, Pair
from mmdeploy_llm.desk.outcome import Answer, refused
from mmdeploy_llm.desk.ticket import Ask
from mmdeploy_llm.errors import EngineError, WorkerDiedError

from .deaths import MAX_DEATHS, Ledger, groups_of

logger = logging.getLogger(__name__)

DEAD = 70  # exit status of a process whose engine has died


def num_at_once(num_seqs: int, num_rows: int) -> int:
    """Returns how many blocks of num_rows an engine answers at the same time: twice what it
    computes, so that it has work while a block ends and the next one comes."""
    return max(2, -(-2 * num_seqs // num_rows))


def end_process(error: EngineError) -> NoReturn:
    """Ends this process, whose engine has died, as abruptly as if it had been killed: what is left
    to do takes the same way in both cases."""
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
        self._room = Room()

    def answer(self, block: str, pairs: Sequence[Pair]) -> list[Answer]:
        """Returns the answers of a block in the order of its prompts, without the prompts. block:
        its name, the same after the death of a process."""
        with self._room.shared():
            deaths = self._ledger.begin(block, len(pairs))
            answers = {} if deaths else self._run(pairs, range(len(pairs)))
        if deaths:
            answers = self._one_by_one(block, pairs, deaths)
        self._ledger.end(block)
        return [answers[index] for index in range(len(pairs))]

    def _one_by_one(
        self, block: str, pairs: Sequence[Pair], deaths: Sequence[int]
    ) -> dict[int, Answer]:
        """Answers a block that has met a death: its suspects by themselves, then the others."""
        answers: dict[int, Answer] = {}
        for row, count in enumerate(deaths):
            if count >= MAX_DEATHS:
                answers[row] = _poisonous(row, pairs[row])
        groups = groups_of(deaths)
        if groups:
            with self._room.alone():
                for group in groups:
                    self._ledger.run(block, group)
                    answers |= self._run(pairs, group)
                self._ledger.run(block, ())
        rest = [row for row in range(len(pairs)) if row not in answers]
        with self._room.shared():
            self._ledger.run(block, rest)
            return answers | self._run(pairs, rest)

    def _run(self, pairs: Sequence[Pair], rows: Sequence[int]) -> dict[int, Answer]:
        try:
            found = list(self._llm.answer_each(pairs[row] for row in rows))
        except EngineError as error:
            self._on_death(error)
        return {rows[own.index]: _light(rows[own.index], own) for own in found}


def _light(row: int, answer: Answer) -> Answer:
    """Returns an answer without the prompt, which the receiver has."""
    return replace(answer, index=row, output=replace(answer.output, item=None))


def _poisonous(row: int, pair: Pair) -> Answer:
    """Returns the answer of a row that is not tried any more."""
    error = WorkerDiedError(
        f"the process of the engine died {MAX_DEATHS} times while it computed this item, the last "
        "time with nothing else; it is not tried again in this run"
    )
    prompt, params = pair
    output = refused(Ask(prompt=prompt, params=params), error)
    return _light(row, Answer(index=row, output=output, error=error))


class Room:
    """A process in which blocks are answered together, or one alone. Who wants to be alone goes
    first: the others wait."""

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
