"""Validated: answers that keep to a JSON schema and other checks, or say how they break them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from mmdeploy_llm.batch.progress.reporter import Tell, silent
from mmdeploy_llm.errors import OK, InvalidAnswerError
from mmdeploy_llm.values.outputs.request_output import Completions

from .checker import TooExpensiveError
from .rounds import Rounds

if TYPE_CHECKING:
    from mmdeploy_llm.engine.desk.answerer import Answerer
    from mmdeploy_llm.engine.desk.ask import Ask
    from mmdeploy_llm.engine.desk.outcome import Answer

# Of a retry where the answer was the most probable one: a seed alone would change nothing there.
RETRY_TEMPERATURE = 0.7
SEED_STEP = 1_000_003  # sample i of n uses seed + i
MAX_SEED = 2**31


class Check(Protocol):
    """Checks texts. name: of what a text breaks. needs_end: whether a text that was cut off is not
    asked again for breaking it, since another one would be cut off too."""

    name: str
    needs_end: bool

    def violation(self, text: str) -> str | None:
        """Returns what is wrong with a text, None when nothing is. Raises TooExpensiveError."""


class Validated:
    """An Answerer that checks the answers of another one, and asks up to `most` times again for an
    answer that breaks one of the checks: with another seed, and with RETRY_TEMPERATURE if the
    answer was greedy. Items that have failed are not checked. Used by one call.

    asked_again: counts the answers that are asked again, by the check that they broke.
    """

    def __init__(
        self, llm: Answerer, checks: Sequence[Check], most: int, tell: Tell = silent
    ) -> None:
        self._llm, self._checks, self._most, self._tell = llm, checks, most, tell
        self.asked_again = Counter[str]()

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields answers as they finish; one that breaks a check to the end is an error with its
        text."""
        rounds = Rounds(asks)
        while not rounds.is_over:
            with closing(self._llm.answer_each(rounds.asks())) as answers:
                for answer in answers:
                    found = self._violation(answer)
                    if found is None:
                        yield answer
                    elif found.is_cut:
                        yield _cut(answer)
                    elif found.can_retry and answer.ask.num_retries < self._most:
                        rounds.again(self._told(_retry(answer.ask), found))
                    else:
                        yield _failed(answer, found)

    def _violation(self, answer: Answer) -> _Violation | None:
        """Returns what is wrong with the first wrong sample: it may break the constraint that it
        was generated with already."""
        if answer.output.error_code not in (OK, InvalidAnswerError.code):
            return None
        for place, sample in enumerate(answer.output.outputs):
            is_cut = sample.finish_reason == "length"
            if sample.is_valid is False:
                words = sample.error_msg or ""
                return _Violation(broken="its constraint", words=words, place=place, is_cut=is_cut)
            found = self._violation_of(sample.text.strip(), place, is_cut)
            if found is not None:
                return found
        return None

    def _violation_of(self, text: str, place: int, is_cut: bool) -> _Violation | None:
        for check in self._checks:
            try:
                words = check.violation(text)
            except TooExpensiveError as error:
                words = str(error)
                return _Violation(broken=check.name, words=words, place=place, can_retry=False)
            if words is not None:
                is_lost = is_cut and check.needs_end
                return _Violation(broken=check.name, words=words, place=place, is_cut=is_lost)
        return None

    def _told(self, ask: Ask, found: _Violation) -> Ask:
        """Counts and tells that something is asked again."""
        self.asked_again[found.broken] += 1
        item_id = getattr(ask.item, "id", None)
        why = {"check": found.broken, "why": found.words}
        self._tell("retried", id=item_id, number=ask.num_retries, **why)
        return ask


@dataclass(frozen=True, slots=True, kw_only=True)
class _Violation:
    """A fault of a sample. broken: what it breaks. place: of the sample. can_retry: whether
    another answer may be right. is_cut: whether it was cut off, and breaks it for that reason."""

    broken: str
    words: str
    place: int
    can_retry: bool = True
    is_cut: bool = False


def _retry(ask: Ask) -> Ask:
    params, number = ask.params, ask.num_retries + 1
    changes: dict[str, float] = {}
    if params.seed is not None:  # without one every prompt draws another text by itself
        changes["seed"] = (params.seed + number * SEED_STEP) % MAX_SEED
    if params.is_greedy:
        changes["temperature"] = RETRY_TEMPERATURE
        changes.update({"top_k": 0} if params.top_k == 1 else {})
        changes.update({"top_p": 1.0} if params.top_p == 0 else {})
    return replace(ask, params=params.model_copy(update=changes), num_retries=number)


def _failed(answer: Answer, found: _Violation) -> Answer:
    count = answer.ask.num_retries
    tried = f", also after {count} retries" if count else ""
    words = f"the answer breaks {found.broken}{tried}: {found.words}"
    fault: dict[str, Any] = {"error_code": InvalidAnswerError.code, "error_msg": words}
    samples = list(answer.output.outputs)
    samples[found.place] = replace(samples[found.place], finish_reason="error", **fault)
    output = replace(answer.output, outputs=Completions(samples), **fault)
    return replace(answer, output=output, error=InvalidAnswerError(words))


def _cut(answer: Answer) -> Answer:
    """Returns an answer that was cut off without the error that its JSON is not whole: its outcome
    says what happened."""
    fine: dict[str, Any] = {"error_code": OK, "error_msg": None}
    samples = [
        replace(own, **fine) if own.finish_reason == "length" else own
        for own in answer.output.outputs
    ]
    fault = next((own for own in samples if not own.is_ok), None)
    if fault is not None:
        fine = {"error_code": fault.error_code, "error_msg": fault.error_msg}
    output = replace(answer.output, outputs=Completions(samples), **fine)
    return replace(answer, output=output, error=None)
