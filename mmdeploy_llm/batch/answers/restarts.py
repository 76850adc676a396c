"""Restarting: answers with an engine that is started again when it dies. What it was computing is
asked again as engine/desk/deaths.py says: together with others, then alone, then not any more."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from mmdeploy_llm.batch.progress.reporter import Tell, silent
from mmdeploy_llm.engine.desk.answerer import LoadedModel
from mmdeploy_llm.engine.desk.deaths import again, given_up
from mmdeploy_llm.errors import EngineError, MMDeployLLMError, WorkerDiedError

from .rounds import Rounds

if TYPE_CHECKING:
    from mmdeploy_llm.engine.desk.ask import Ask
    from mmdeploy_llm.engine.desk.outcome import Answer

logger = logging.getLogger(__name__)

SERVER_FAULT = 500


class Restarting:
    """An Answerer that starts the engine of `llm` again up to `most` times in a row. The count
    begins anew when the item that ends the engine is found. Used by one call."""

    def __init__(self, llm: LoadedModel, most: int, tell: Tell = silent) -> None:
        self._llm, self._most, self._tell = llm, most, tell
        self._num_restarts = self._num_revived = 0
        self._last: EngineError | None = None
        self._in_flight: dict[Ask, None] = {}  # in the order in which they were asked

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields answers as they finish. Raises the engine's error when it has died too often,
        after the answers of the items in flight, which say so."""
        rounds = Rounds(asks)
        while not rounds.is_over:
            lost: list[Answer] = []
            try:
                with closing(self._llm.answer_each(self._noted(rounds))) as answers:
                    for answer in answers:
                        del self._in_flight[answer.ask]
                        if self._is_lost(answer):
                            lost.append(answer)
                        else:
                            yield answer
                        self._revive()
            except EngineError:
                if self._llm.death is None:
                    raise
            unanswered, self._in_flight = list(self._in_flight), {}
            if not lost and not unanswered and self._llm.death is None:
                continue
            if not self._restart(len(lost) + len(unanswered)):
                yield from lost
                assert self._last is not None
                raise self._last
            for ask in (*(answer.ask for answer in lost), *unanswered):
                later = replace(ask, num_deaths=ask.num_deaths + 1)
                if again(later.num_deaths) == "together":
                    rounds.again(later)
                else:
                    yield from self._alone(later)

    def _noted(self, rounds: Rounds) -> Iterator[Ask]:
        for ask in rounds.asks():
            self._in_flight[ask] = None
            yield ask

    def _revive(self) -> None:
        """Starts engines in place of those that died while others go on, `most` times; when that
        fails, the others do the rest."""
        if not self._llm.num_dead or self._num_revived >= self._most:
            return
        self._num_revived += 1
        logger.warning("one of several engines died; it is started again")
        self._tell("engine_restarted", reason="one of several engines died", num_items=0)
        try:
            self._llm.revive()
        except MMDeployLLMError as error:
            self._num_revived = self._most
            logger.error("it cannot be started again, the other engines go on: %s", error)

    def _is_lost(self, answer: Answer) -> bool:
        """Returns whether the engine died before it had an answer."""
        is_fault = answer.output.error_code >= SERVER_FAULT
        return isinstance(answer.error, WorkerDiedError) or (
            is_fault and self._llm.death is not None
        )

    def _alone(self, ask: Ask) -> Generator[Answer, None, None]:
        """Answers one item while nothing else is in the engine."""
        found: Answer | None = None
        try:
            with closing(self._llm.answer_each([ask])) as answers:
                for answer in answers:
                    found = answer
        except EngineError:
            if self._llm.death is None or found is None:
                raise
        assert found is not None
        if not self._is_lost(found):
            yield found
            return
        error = given_up(found.output.error_msg)
        self._num_restarts = self._num_revived = 0  # the reason is known
        self._restart(0, is_counted=False)
        yield replace(found, output=replace(found.output, error_msg=str(error)), error=error)

    def _restart(self, num_lost: int, *, is_counted: bool = True) -> bool:
        """Starts the engine again; returns False when that was done too often."""
        self._last = self._llm.death or self._last or EngineError("an engine died")
        if self._llm.death is None:
            return True  # of several engines, another one does the rest
        if is_counted and self._num_restarts >= self._most:
            return False
        self._num_restarts += is_counted
        logger.warning(
            "the engine died (%s); it is started again, and %d items are done again",
            self._last,
            num_lost,
        )
        self._tell("engine_restarted", reason=str(self._last), num_items=num_lost)
        self._llm.restart()
        return True
