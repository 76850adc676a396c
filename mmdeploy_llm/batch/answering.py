"""Prepares what answers the prompts of a batch."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from mmdeploy_llm.batch.answers.restarts import Restarting
from mmdeploy_llm.batch.answers.validated import Check, Validated
from mmdeploy_llm.batch.progress.reporter import Tell
from mmdeploy_llm.batch.questions.boxed import Boxed
from mmdeploy_llm.engine.desk.answerer import Answerer, LoadedModel
from mmdeploy_llm.errors import ConfigError

from .run import RunCounts, Tally

if TYPE_CHECKING:
    from mmdeploy_llm.engine.desk.ask import Ask
    from mmdeploy_llm.engine.desk.outcome import Answer

    from .settings import BatchSettings

logger = logging.getLogger(__name__)


def answerer_of(
    llm: Answerer, settings: BatchSettings, checks: Sequence[Check], tell: Tell
) -> Answerer:
    """Wraps the LLM so that prompts are asked again after a death and for invalid answers, and
    boxes are read. Raises ConfigError for one that finds no boxes."""
    own, name = llm, type(llm).__name__
    loaded = llm if isinstance(llm, LoadedModel) else None
    if loaded is None and not isinstance(llm, NoModel):
        if settings.boxes:
            raise ConfigError(f"{name} reads no boxes in answers: leave boxes out")
        if settings.engine_restarts:
            logger.warning(
                "engine_restarts = %d has no effect: %s does not start its engine again",
                settings.engine_restarts,
                name,
            )
    if loaded is not None and settings.engine_restarts:
        own = Restarting(loaded, settings.engine_restarts, tell)
    if checks:
        own = Validated(own, checks, settings.validate_retries, tell)
    return own if loaded is None or not settings.boxes else Boxed(loaded, own)


def counts_of(tally: Tally, answerer: Answerer) -> RunCounts:
    """Returns the counts of a run, with those of answers that were asked again."""
    counts = tally.counts()
    if isinstance(answerer, Boxed):
        counts.boxes, answerer = answerer.counts, answerer.inner
    if isinstance(answerer, Validated):
        counts.asked_again = answerer.asked_again
    return counts


class NoModel:
    """Stands in for the model when only lines that cannot be used are left."""

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Exhausts the asks, which must be empty: bad lines are recorded on the way."""
        for ask in asks:
            raise AssertionError(f"an item reached a run without a model: {ask.prompt!r}")
        yield from ()

    def __enter__(self) -> NoModel:
        return self

    def __exit__(self, *_: object) -> None:
        return None
