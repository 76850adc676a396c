"""Opens the checks of a run's answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from .checker import Checker
from .rules import TextRules
from .schemas import AnswerSchema, ModelCheck
from .validated import Check


@contextmanager
def open_checks(schema: AnswerSchema | None, rules: TextRules) -> Iterator[list[Check]]:
    """Yields the checks of answers, the schema's first, and closes them. Raises ConfigError as
    Checker does."""
    if schema is None:
        yield rules.checks()
        return
    if schema.model is not None:
        yield [ModelCheck(schema.model), *rules.checks()]
        return
    with closing(Checker(schema.values)) as checker:
        yield [checker, *rules.checks()]
