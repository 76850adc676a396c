"""Restarting: answers with an engine that is started again when it dies.

Items that were in flight when an engine died are asked again. One that was in flight twice is
asked alone: if the engine dies once more, that item is the reason and gets its error.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from mmdeploy_llm.errors import EngineError, MMDeployLLMError, WorkerDiedError

from .rounds import Pair, Restartable, Rounds, Task

if TYPE_CHECKING:
    from mmdeploy_llm.desk.outcome import Answer

logger = logging.getLogger(__name__)

MAX_DEATHS = 2  # in which an item is in flight together with others
SERVER_FAULT = 500


class Restarting:
    """An Answerer that starts the engine of `llm` again up to `most` times in a row. The count
    begins anew when the item that ends the engine is found. Used by one call."""

    def __init__(self, llm: Restartable, most: int) -> None:
        self._llm, self._most = llm, most
        self._num_restarts = self._num_revived = 0
        self._last: EngineError | None = None

    def answer_each(self, pairs: Iterable[Pair]) -> Generator[Answer, None, None]:
        """Yields answers as they finish. Raises the engine's error when it has died too often,
        after the answers of the items in flight, which say so."""
        rounds = Rounds(pairs)
        while not rounds.is_over:
            lost: list[tuple[Task, Answer]] = []
            try:
                with closing(self._llm.answer_each(rounds.pairs())) as answers:
                    for answer in answers:
                        task = rounds.answered(answer.index)
                        own = replace(answer, index=task.index)
                        if self._is_lost(answer):
                            lost.append((task, own))
                        else:
                            yield own
                        self._revive()
            except EngineError:
                if self._llm.death is None:
                    raise
            missing = rounds.taken_back()
            if not lost and not missing and self._llm.death is None:
                continue
            if not self._restart(len(lost) + len(missing)):
                yield from (answer for _, answer in lost)
                assert self._last is not None
                raise self._last
            for task in (*(task for task, _ in lost), *missing):
                later = replace(task, num_again=task.num_again + 1)
                if later.num_again < MAX_DEATHS:
                    rounds.again(later)
                else:
                    yield from self._alone(later)

    def _revive(self) -> None:
        """Starts engines in place of those that died while others go on, `most` times; when that
        fails, the others do the rest."""
        if not self._llm.num_dead or self._num_revived >= self._most:
            return
        self._num_revived += 1
        logger.warning("one of several engines died; it is started again")
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

    def _alone(self, task: Task) -> Generator[Answer, None, None]:
        """Answers one item while nothing else is in the engine."""
        found: Answer | None = None
        try:
            with closing(self._llm.answer_each([(task.prompt, task.params)])) as answers:
                for answer in answers:
                    found = replace(answer, index=task.index)
        except EngineError:
            if self._llm.death is None or found is None:
                raise
        assert found is not None
        if not self._is_lost(found):
            yield found
            return
        words = (
            f"the engine died {MAX_DEATHS + 1} times while it computed this item, the last time "
            f"alone: {found.output.error_msg}"
        )
        self._num_restarts = self._num_revived = 0  # the reason is known
        self._restart(0, is_counted=False)
        yield replace(
            found, output=replace(found.output, error_msg=words), error=WorkerDiedError(words)
        )

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
        self._llm.restart()
        return True
